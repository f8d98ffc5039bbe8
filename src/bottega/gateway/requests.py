"""A chat-completions body as the gateway understands it: what is asked, whether examples may be put
before it, whether its answer may become one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import orjson

from bottega.gateway.ports import Body, TierCapabilities
from bottega.image import Image
from bottega.openai_api.chunks import CHARACTERS_PER_TOKEN
from bottega.types import Query

INSTRUCTING = ("system", "developer")
# Titles, tags and follow-ups that chat front ends ask for behind the user's back.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
ASCII = bytes(range(128))
IMAGE_TOKENS = {"low": 85}
MOST_IMAGE_TOKENS = 1100
TOOLS = ("tools", "functions", "tool_choice", "function_call")
# Fields that servers write into the prompt.
PROMPT_FIELDS = ("tools", "functions", "response_format")
# Parts with encoded media in the field of the same name; all other fields count as text.
MEDIA_PARTS = ("image_url", "input_audio", "audio_url", "video_url", "file")
OTHER_PART_TOKENS = 1100  # a file, a sound
TOOL_ROLES = ("tool", "function")
# How a reply travels, who asked, and what changes a reply no more than chance does.
TUNING = {
    "frequency_penalty",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_logprobs",
    "top_p",
    "user",
}
MILD = 1.0  # the temperature up to which a model means what it says
PLAIN_ROLES = (*INSTRUCTING, "user", "assistant")


@dataclass(slots=True)
class Part:
    """An image as the client refers to it: its URL, and the detail that it asks for."""

    url: str
    detail: str | None = None


@dataclass(slots=True)
class Needs:
    """What a tier must be able to take. `tokens` is an estimate, without the demonstrations.
    `non_ascii_bytes` are the UTF-8 bytes of its text outside ASCII."""

    images: int = 0
    tools: bool = False
    audio: bool = False
    tokens: int = 0
    non_ascii_bytes: int = 0

    def met_by(self, capabilities: TierCapabilities) -> bool:
        return (
            (capabilities.images is None or self.images <= capabilities.images)
            and (capabilities.tools or not self.tools)
            and (capabilities.audio or not self.audio)
            and (capabilities.context is None or self.tokens <= capabilities.context)
        )


@dataclass
class Chat:
    """`passes` says why nothing can be put before the question, None if something can. `images`
    are those of the whole conversation, `asked` the text of the last user turn."""

    body: Body
    model: str
    stream: bool
    include_usage: bool
    images: tuple[Part, ...]
    asked: str
    needs: Needs
    passes: str | None = None
    single_turn: bool = True
    text_first: bool = False  # before the images of the question
    before: int = 0  # how many messages stand before the conversation

    @cached_property
    def context(self) -> str:
        """What the answer depends on beside the conversation; empty if there is nothing. Unknown
        fields count: some servers let them choose the answer's words."""
        instructions, shape = _messages(self.body)[: self.before], self.body.get("response_format")
        steered = {
            name: value
            for name in self.body.keys() - TUNING
            if (value := self.body[name]) not in (None, [], {}, "", 0)
        }
        if cast(float, self.body.get("temperature") or 0) > MILD:
            steered["temperature"] = "hot"
        if not instructions and shape is None and not steered:
            return ""
        told: list[object] = [[_instruction(message) for message in instructions], shape]
        told += [steered] if steered else []
        return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]

    def query(self, pictures: Sequence[Image]) -> Query:
        return Query(self.asked, tuple(pictures), context=self.context)


def read_chat(body: Body, *, background: re.Pattern[str]) -> Chat:
    """Of a body whose shape was checked before."""
    messages = _messages(body)
    seen = _Seen()
    for message in messages:
        seen.look_at(message)
    before = _instructions(messages)
    turns = messages[before:]
    asked = _text(turns[-1]) if turns and turns[-1].get("role") == "user" else ""
    options = body.get("stream_options")
    # "none" without tools changes nothing.
    tools = seen.tools or any(body.get(name) and body[name] != "none" for name in TOOLS)
    audio = seen.audio or bool(body.get("audio")) or "audio" in str(body.get("modalities", ""))
    seen.add_json(*(body.get(name) for name in PROMPT_FIELDS))
    tokens = int(seen.characters / CHARACTERS_PER_TOKEN)
    tokens += sum(map(_image_tokens, seen.images)) + OTHER_PART_TOKENS * seen.others
    return Chat(
        body=body,
        model=str(body.get("model")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        images=tuple(seen.images),
        asked=asked,
        needs=Needs(len(seen.images), tools, audio, tokens, seen.non_ascii_bytes),
        passes=_reason(turns, asked, tools, audio, seen, background),
        single_turn=len(turns) == 1,
        text_first=bool(turns) and _text_first(turns[-1]),
        before=before,
    )


class _Seen:
    """What stands in the messages, looked at once."""

    def __init__(self) -> None:
        self.images: list[Part] = []
        self.characters = 0
        self.non_ascii_bytes = 0
        self.others = 0
        self.tools = False
        self.audio = False
        self.other_parts = False
        self.other_roles = False

    def look_at(self, message: Body) -> None:
        role, content = message.get("role"), message.get("content")
        if message.get("tool_calls") or message.get("function_call") or role in TOOL_ROLES:
            self.tools = True
        elif role not in PLAIN_ROLES:
            self.other_roles = True
        # Servers write reasoning, names and refusals into the prompt, too.
        self._add_fields(message, ("role",) if isinstance(content, str) else ("role", "content"))
        if isinstance(content, list):
            for part in content:
                self._look_at_part(part)

    def add_text(self, text: str) -> None:
        self.characters += len(text)
        self.non_ascii_bytes += non_ascii_bytes(text)

    def add_json(self, *values: object) -> None:
        for value in filter(None, values):
            self.add_text(orjson.dumps(value).decode())

    def _look_at_part(self, part: Body) -> None:
        kind = part.get("type")
        self._add_fields(part, ("type", kind) if kind in MEDIA_PARTS else ("type",))
        if kind == "image_url":
            self.images.extend(_image(part))
        elif kind != "text":
            self.others += 1
            self.audio |= kind == "input_audio"
            self.other_parts |= kind != "input_audio"

    def _add_fields(self, found: Body, without: Sequence[object]) -> None:
        for name, value in found.items():
            if name in without:
                continue
            if isinstance(value, str):
                self.add_text(value)
            elif isinstance(value, dict | list):
                self.add_json(value)


def max_text_tokens(value: object) -> int:
    """Return a cautious estimate of the tokens in the text of a JSON value."""
    text = orjson.dumps(value).decode()
    return int(len(text) / CHARACTERS_PER_TOKEN) + non_ascii_bytes(text)


def non_ascii_bytes(text: str) -> int:
    """Return the UTF-8 bytes of the text's characters outside ASCII."""
    if text.isascii():
        return 0
    return len(text.encode("utf-8", "surrogatepass").translate(None, ASCII))


def _reason(
    turns: Sequence[Body],
    asked: str,
    tools: bool,
    audio: bool,
    seen: _Seen,
    background: re.Pattern[str],
) -> str | None:
    if tools:
        return "tools"
    if audio:
        return "audio"
    if not turns or turns[-1].get("role") != "user":
        return "no question"
    if seen.other_roles:
        return "roles"
    if seen.other_parts:
        return "parts"
    if background.search(asked):
        return "background"
    return None if asked.strip() or any(_images(turns[-1])) else "nothing asked"


def _messages(body: Body) -> list[Body]:
    return cast(list[Body], body["messages"])


def _instructions(messages: Sequence[Body]) -> int:
    count = 0
    while count < len(messages) and messages[count].get("role") in INSTRUCTING:
        count += 1
    return count


def _instruction(message: Body) -> object:
    shown = [hashlib.sha256(one.url.encode()).hexdigest() for one in _images(message)]
    return [_text(message), *shown] if shown else _text(message)


def _parts(message: Body) -> list[Body]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _text(message: Body) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join([str(part["text"]) for part in _parts(message) if part["type"] == "text"])


def parts_of(message: Body) -> Iterator[str | Part]:
    """Texts and images in their order."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in _parts(message):
        if part.get("type") == "text":
            yield str(part.get("text"))
        elif part.get("type") == "image_url":
            yield from _image(part)


def _text_first(message: Body) -> bool:
    return isinstance(next(parts_of(message), None), str) and any(_images(message))


def _images(message: Body) -> Iterator[Part]:
    yield from (part for part in parts_of(message) if isinstance(part, Part))


def _image(part: Body) -> Iterator[Part]:
    image = part.get("image_url")
    if isinstance(image, str):
        yield Part(image)
    elif isinstance(image, dict):
        detail = image.get("detail")
        yield Part(str(image.get("url")), detail if isinstance(detail, str) else None)


def _image_tokens(image: Part) -> int:
    return IMAGE_TOKENS.get(image.detail or "", MOST_IMAGE_TOKENS)
