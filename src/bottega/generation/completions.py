"""Generator for endpoints without a chat template: plain text completion."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.generation.openai_compatible import OpenAIGenerator
from bottega.image import Image
from bottega.openai_api.client import Fields
from bottega.openai_api.endpoint import COMPLETIONS_PATH
from bottega.openai_api.errors import JSONObject
from bottega.openai_api.response import get
from bottega.types import Message, Prompt, Sampling

QUESTION, ANSWER = "Question:", "Answer:"
NEXT_QUESTION = f"\n{QUESTION}"
MAX_STOPS = 4  # of OpenAI's protocol
BLANK_LINES = re.compile(r"\n\s*\n")


class OpenAICompletionsGenerator(OpenAIGenerator):
    """Generator for base models at `{base_url}/completions`: vLLM, llama.cpp, Ollama and others.

    The settings are those of `OpenAIGenerator`. The prompt is text (`render_turns`), and a reply
    ends where the model begins the next question. Its name is `completions:MODEL`. A prompt with an
    image raises `SettingError`.
    """

    turns_only = True  # demonstrations are turns: the model continues their pattern

    path = COMPLETIONS_PATH
    name_prefix = "completions:"

    @staticmethod
    def convert(body: JSONObject) -> JSONObject:
        return to_chat(body)

    def _fields(self, sampling: Sampling) -> Fields:
        """Return the fields of the body. `logprobs` is a number in this protocol."""
        fields = super()._fields(sampling)
        if len(sampling.stop) < MAX_STOPS and "stop" not in self._extra:
            fields["stop"] = [*sampling.stop, NEXT_QUESTION]
        if fields.get("logprobs") is True:
            fields["logprobs"] = 1
        return fields

    def _content(self, prompt: Prompt) -> Fields:
        return {"prompt": render_turns(prompt.messages)}


def render_turns(messages: Sequence[Message]) -> str:
    """Return the messages as text that ends with `Answer:`.

    A user turn becomes `Question: ...` and an assistant turn `Answer: ...`, with a blank line after
    it. A system turn, or a user turn before another one (a passage), is a paragraph. Blank lines in
    turns are removed. Raises `SettingError` for images.
    """
    roles = [message.role for message in messages]
    parts: list[str] = []
    for index, message in enumerate(messages):
        text = BLANK_LINES.sub("\n", _text(message).strip())
        following = roles[index + 1] if index + 1 < len(roles) else "assistant"
        if message.role == "assistant":
            parts.append(f"{ANSWER} {text.removeprefix(ANSWER).lstrip()}\n\n")
        elif message.role == "user" and following == "assistant":
            parts.append(f"{QUESTION} {text}\n")
        else:
            parts.append(f"{text}\n\n")
    # No space at the end: the token of an answer's first word includes the space.
    return "".join(parts) + ANSWER


def _text(message: Message) -> str:
    texts = [part for part in message.parts if isinstance(part, str)]
    if any(isinstance(part, Image) for part in message.parts):
        raise SettingError(
            "text completion reads no images, got a prompt with an image",
            hint="set --model openai:NAME for a vision model with a chat template",
        )
    return "\n".join(texts)


def to_chat(body: JSONObject) -> JSONObject:
    """Return a text completion as the chat completion with the same texts, log-probabilities and
    usage. A choice without text stays unchanged: the parser of chat completions rejects it."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        return body
    return {**body, "choices": [_chat_choice(choice) for choice in choices]}


def _chat_choice(choice: object) -> object:
    text = get(choice, "text")
    if not isinstance(choice, dict) or not isinstance(text, str):
        return choice
    values = get(get(choice, "logprobs"), "token_logprobs")
    tokens = [{"logprob": value} for value in values] if isinstance(values, list) else []
    message = {"role": "assistant", "content": text.strip()}
    return {**choice, "message": message, "logprobs": {"content": tokens} if tokens else None}
