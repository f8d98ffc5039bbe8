"""Prompts of chat requests: for traces, and for the branches and rewards of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bottega.gateway.request.calls import answer_text
from bottega.image import Image
from bottega.openai_api.request import (
    INSTRUCTION_ROLES,
    ChatMessage,
    ChatRequest,
    ImagePart,
    TextPart,
)
from bottega.types import Candidate, Message, Prompt, Query


def request_prompt(
    request: ChatRequest, images: Mapping[str, Image], shown: Sequence[Candidate]
) -> Prompt:
    """Return the request with its demonstrations as a prompt. `images` are those of the request by
    URL."""
    count = request.instruction_count
    messages = [_message(message, images) for message in request.messages]
    return Prompt((*messages[:count], *_demonstrations(request, shown), *messages[count:]))


def question_prompt(
    request: ChatRequest, images: Mapping[str, Image], query: Query, shown: Sequence[Candidate]
) -> Prompt:
    """Return a prompt for another question with the instructions of the request."""
    instructions = [_message(message, images) for message in request.instructions]
    return Prompt((*instructions, *_demonstrations(request, shown), _question(request, query)))


def _demonstrations(request: ChatRequest, shown: Sequence[Candidate]) -> Iterable[Message]:
    for example in (one.example for one in shown):
        yield _question(request, example.query)
        yield Message("assistant", (answer_text(example),))


def _question(request: ChatRequest, query: Query) -> Message:
    images, text = query.images, query.text
    return Message("user", (text, *images) if request.text_first else (*images, text))


def _message(message: ChatMessage, images: Mapping[str, Image]) -> Message:
    parts: list[str | Image] = []
    for part in message.parts or ():
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, ImagePart):
            parts.append(images[part.url])
    if message.role in INSTRUCTION_ROLES:
        return Message("system", tuple(parts))
    return Message("assistant" if message.role == "assistant" else "user", tuple(parts))
