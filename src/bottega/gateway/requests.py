"""A chat-completions body as the gateway understands it: what is asked, whether examples may be put
before it, whether its answer may become one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from bottega.gateway.ports import Body, Takes
from bottega.image import Image
from bottega.types import Query

INSTRUCTING = ("system", "developer")
# Titles, tags and follow-ups that chat front ends ask for behind the user's back.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
CHARACTERS_A_TOKEN = 3.5
IMAGE_TOKENS = {"low": 85}
MOST_IMAGE_TOKENS = 1100
TOOLS = ("tools", "functions", "tool_choice", "function_call")
PLAIN_ROLES = (*INSTRUCTING, "user", "assistant")


@dataclass(frozen=True)
class Part:
    """An image as the client refers to it: its URL, and the detail that it asks for."""

    url: str
    detail: str | None = None


@dataclass(frozen=True)
class Needs:
    """What a tier must be able to take. `tokens` is an estimate, without the demonstrations."""

    images: int = 0
    tools: bool = False
    audio: bool = False
    tokens: int = 0

    def met_by(self, takes: Takes) -> bool:
        return (
            (takes.images is None or self.images <= takes.images)
            and (takes.tools or not self.tools)
            and (takes.audio or not self.audio)
            and (takes.context is None or self.tokens <= takes.context)
        )


@dataclass(frozen=True)
class Chat:
    """`passes` says why nothing can be put before the question, None if something can. `images`
    are those of the whole conversation, `asked` the text of the last user turn."""

    body: Body
    model: str
    stream: bool
    include_usage: bool
    images: tuple[Part, ...]
    asked: str
    context: str
    needs: Needs
    passes: str | None = None
    single_turn: bool = True
    before: int = field(default=0)  # how many messages stand before the conversation

    def query(self, pictures: Sequence[Image]) -> Query:
        return Query(self.asked, tuple(pictures), context=self.context)


def read_chat(body: Body, *, background: re.Pattern[str]) -> Chat:
    """Of a body whose shape was checked before."""
    messages = _objects(body.get("messages"))
    before = _instructions(messages)
    turns = messages[before:]
    images = tuple(image for message in messages for image in _images(message))
    asked = _text(turns[-1]) if turns and turns[-1].get("role") == "user" else ""
    options = body.get("stream_options")
    tools = any(body.get(name) for name in TOOLS) or any(map(_is_of_tools, messages))
    audio = "audio" in str(body.get("modalities")) or bool(body.get("audio")) or _hear(messages)
    return Chat(
        body=body,
        model=str(body.get("model")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        images=images,
        asked=asked,
        context=_context(body, messages[:before]),
        needs=Needs(len(images), tools, audio, _tokens(messages, images)),
        passes=_reason(body, turns, asked, tools, audio, background),
        single_turn=len(turns) == 1,
        before=before,
    )


def _reason(
    body: Body,
    turns: Sequence[Body],
    asked: str,
    tools: bool,
    audio: bool,
    background: re.Pattern[str],
) -> str | None:
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("tools", lambda: tools),
        ("audio", lambda: audio),
        ("no question", lambda: not turns or turns[-1].get("role") != "user"),
        ("roles", lambda: any(turn.get("role") not in PLAIN_ROLES for turn in turns)),
        ("parts", lambda: any(map(_has_other_parts, turns))),
        ("background", lambda: background.search(asked) is not None),
        ("nothing asked", lambda: not asked.strip() and not any(_images(turns[-1]))),
    )
    return next((name for name, holds in checks if holds()), None)


def _context(body: Body, instructions: Sequence[Body]) -> str:
    """What the answer depends on beside the conversation; empty if there is nothing."""
    shape = body.get("response_format")
    if not instructions and shape is None:
        return ""
    told = [[_text(message) for message in instructions], shape]
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _instructions(messages: Sequence[Body]) -> int:
    return next(
        (i for i, one in enumerate(messages) if one.get("role") not in INSTRUCTING), len(messages)
    )


def _objects(value: object) -> list[Body]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _parts(message: Body) -> list[Body]:
    return _objects(message.get("content"))


def _text(message: Body) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in _parts(message) if part.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str))


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


def _images(message: Body) -> Iterator[Part]:
    yield from (part for part in parts_of(message) if isinstance(part, Part))


def _image(part: Body) -> Iterator[Part]:
    image = part.get("image_url")
    if isinstance(image, str):
        yield Part(image)
    elif isinstance(image, Mapping):
        detail = image.get("detail")
        yield Part(str(image.get("url")), detail if isinstance(detail, str) else None)


def _is_of_tools(message: Body) -> bool:
    calls = message.get("tool_calls") or message.get("function_call")
    return bool(calls) or message.get("role") in ("tool", "function")


def _hear(messages: Sequence[Body]) -> bool:
    parts = (part for message in messages for part in _parts(message))
    return any(part.get("type") == "input_audio" for part in parts)


def _has_other_parts(message: Body) -> bool:
    return any(part.get("type") not in ("text", "image_url") for part in _parts(message))


def _tokens(messages: Sequence[Body], images: Sequence[Part]) -> int:
    seen = sum(IMAGE_TOKENS.get(image.detail or "", MOST_IMAGE_TOKENS) for image in images)
    return int(sum(len(_text(one)) for one in messages) / CHARACTERS_A_TOKEN) + seen
