"""Requests of chat completions: parsing of bodies, checks of fields, and prompts as bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, cast

import orjson

from bottega._util.caching import LRUCache
from bottega._util.progress import plural
from bottega.image import Image
from bottega.openai_api.errors import (
    MAX_NAME,
    ApiError,
    above_limit,
    image_error,
    invalid,
    wrong_type,
)
from bottega.openai_api.streams import CHARACTERS_PER_TOKEN
from bottega.types import Message, Sampling

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# A tool call, or the answer to one, may be without content.
ROLES_WITHOUT_CONTENT = {"assistant", "tool", "function"}
SERVICE_TIER = "service_tier"
DataUrl = Callable[[Image], str]
KEEP_ENCODED = 64 << 20

Body = Mapping[str, object]
JSONDict = dict[str, object]
MB = 1 << 20
INSTRUCTION_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
TOOL_FIELDS = ("tools", "functions", "tool_choice", "function_call")
# Fields that servers write into the prompt.
PROMPT_FIELDS = ("tools", "functions", "response_format")
# Parts with encoded media in the field of the same name; all other fields count as text.
MEDIA_PARTS = ("image_url", "input_audio", "audio_url", "video_url", "file")
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
IMAGE_TOKENS = {"low": 85}
MAX_IMAGE_TOKENS = 1100
OTHER_PART_TOKENS = 1100  # a file, a sound
ASCII = bytes(range(128))
ADDRESS = re.compile(r"\s*(?!data:)[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
INTEGERS, NUMBERS = (int,), (int, float)


@dataclass(frozen=True)
class _Kind:
    expected: str
    fits: Callable[[object], bool]
    numbers: tuple[type, ...] = ()
    """Types of which only the value can be wrong."""

    def reject(self, name: str, value: object) -> NoReturn:
        if type(value) not in self.numbers:
            wrong_type(name, self.expected, value)
        raise invalid(
            f"Invalid value for '{name}': expected {self.expected}, but got {value}.",
            name,
            "invalid_value",
        )


def _is_integer(value: object, low: int = 0, high: int = 2**53) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) <= 1e9


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


STRING = _Kind("a string", lambda value: isinstance(value, str))
BOOLEAN = _Kind("a boolean", lambda value: isinstance(value, bool))
OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = _Kind("an array of objects", lambda value: _is_list_of(value, dict))
NUMBER = _Kind("a number from -1e9 to 1e9", _is_number, NUMBERS)
COUNT = _Kind("an integer of 1 or more", lambda value: _is_integer(value, 1), INTEGERS)
NATURAL = _Kind("an integer of 0 or more", _is_integer, INTEGERS)
TEMPERATURE = _Kind(
    "a number from 0 to 1e9", lambda v: _is_number(v) and cast(float, v) >= 0, NUMBERS
)
# Null means absent everywhere.
FIELDS: Mapping[str, _Kind] = {
    "frequency_penalty": NUMBER,
    "functions": OBJECTS,
    "logit_bias": OBJECT,
    "logprobs": BOOLEAN,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
    "metadata": OBJECT,
    "min_tokens": NATURAL,
    "model": STRING,
    "n": _Kind("an integer from 1 to 128", lambda value: _is_integer(value, 1, 128), INTEGERS),
    "parallel_tool_calls": BOOLEAN,
    "presence_penalty": NUMBER,
    "reasoning_effort": STRING,
    "response_format": OBJECT,
    "seed": _Kind("an integer", lambda value: _is_integer(value, -(2**63), 2**64), INTEGERS),
    "stop": _Kind(
        "a string or an array of strings",
        lambda value: isinstance(value, str) or _is_list_of(value, str),
    ),
    "store": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "temperature": TEMPERATURE,
    "tools": OBJECTS,
    "top_logprobs": NATURAL,
    "top_p": NUMBER,
    "user": STRING,
    "verbosity": STRING,
}


@dataclass(slots=True)
class TextPart:
    """A text. `raw` is the part's JSON."""

    text: str
    raw: Body


@dataclass(slots=True)
class ImagePart:
    """An image by its URL, with the requested `detail`. `param` is its position in the body."""

    url: str
    detail: str | None
    param: str
    raw: Body

    @property
    def tokens(self) -> int:
        return IMAGE_TOKENS.get(self.detail or "", MAX_IMAGE_TOKENS)


@dataclass(slots=True)
class OtherPart:
    """A part of another type: audio, a file, a refusal."""

    kind: str
    param: str
    raw: Body


Part = TextPart | ImagePart | OtherPart


@dataclass(slots=True)
class ChatMessage:
    """One message; `parts` is None if it has no content. `raw` is its JSON."""

    role: str
    parts: tuple[Part, ...] | None
    raw: Body

    @property
    def text(self) -> str:
        """The texts, one a line."""
        return "\n".join([part.text for part in self.parts or () if isinstance(part, TextPart)])

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return tuple(part for part in self.parts or () if isinstance(part, ImagePart))


@dataclass
class ChatRequest:
    """A parsed chat-completions body. `images` are the images of the whole conversation;
    `prompt_tokens` is an estimate, and `non_ascii_bytes` are the UTF-8 bytes of the prompt's text
    outside ASCII. With `keeps_image_urls` a server fetches the images that are given by URL."""

    body: Body
    messages: tuple[ChatMessage, ...]
    images: tuple[ImagePart, ...] = ()
    prompt_tokens: int = 0
    non_ascii_bytes: int = 0
    has_tools: bool = False
    has_audio: bool = False
    has_other_parts: bool = False
    keeps_image_urls: bool = False

    @property
    def model(self) -> str:
        return str(self.body.get("model"))

    @property
    def image_detail(self) -> str | None:
        """The detail of the last image, which demonstrations get, too."""
        return self.images[-1].detail if self.images else None

    @property
    def raw_messages(self) -> list[Body]:
        return cast(list[Body], self.body["messages"])

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @cached_property
    def include_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    @cached_property
    def instruction_count(self) -> int:
        """Number of system and developer messages before the conversation."""
        roles = enumerate(message.role for message in self.messages)
        turns = (number for number, role in roles if role not in INSTRUCTION_ROLES)
        return next(turns, len(self.messages))

    @property
    def instructions(self) -> tuple[ChatMessage, ...]:
        return self.messages[: self.instruction_count]

    @property
    def image_tokens(self) -> int:
        return sum(image.tokens for image in self.images)

    @property
    def total_tokens(self) -> int:
        """The prompt's tokens and those that the reply may have by the client's limit, if any."""
        limits = (self.body.get(name) for name in LIMIT_FIELDS)
        return self.prompt_tokens + max((one for one in limits if isinstance(one, int)), default=0)

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The conversation: all messages after the instructions."""
        return self.messages[self.instruction_count :]

    @property
    def last_user_turn(self) -> ChatMessage | None:
        """The last message if it is the user's."""
        last = self.messages[-1]
        return last if last.role == "user" else None

    @cached_property
    def question(self) -> str:
        """The text of the last turn if it is the user's, else empty."""
        last = self.last_user_turn
        return "" if last is None else last.text

    @cached_property
    def text_first(self) -> bool:
        """Whether the last turn has a text before its images."""
        parts = [part for turn in self.turns[-1:] for part in turn.parts or ()]
        shown = [part for part in parts if not isinstance(part, OtherPart)]
        has_images = any(isinstance(part, ImagePart) for part in shown)
        return has_images and isinstance(shown[0], TextPart)

    @property
    def is_single_turn(self) -> bool:
        return len(self.messages) - self.instruction_count == 1

    def with_messages(self, messages: Sequence[Body]) -> Body:
        """Return the body with other messages."""
        return {**self.body, "messages": list(messages)}


@dataclass(frozen=True)
class BodyLimits:
    """Limits of one body. `image_mb` is the total size of its images, decoded from base64; `depth`
    counts nested brackets."""

    messages: int = 200
    text_characters: int = 1_000_000
    images: int = 16
    image_mb: int = 20
    depth: int = 64


UNLIMITED = BodyLimits(*[2**53] * 4)


def parse_request(body: object, limits: BodyLimits = UNLIMITED) -> ChatRequest:
    """Parse a body, in one walk over it. Raises `ApiError` (400) if it is no chat-completions body
    or exceeds the limits. Unknown fields may hold anything that is not nested deeper than `depth`.
    """
    if not isinstance(body, dict):
        wrong_type("", "an object", body)
    for name, value in body.items():
        if value is None or name == "messages":
            continue
        if (kind := FIELDS.get(name)) and not kind.fits(value):
            kind.reject(name, value)
        if isinstance(value, dict | list):
            _check_depth(value, name, limits.depth)
    require(body, "model", "")
    require(body, "messages", "")
    parser = _Parser(limits)
    messages = parser.parse(body["messages"])
    for name in PROMPT_FIELDS:
        parser.add_json(body.get(name))
    if not body.keys().isdisjoint(TOOL_FIELDS):  # "none" without tools changes nothing
        parser.has_tools |= any(body.get(name) and body[name] != "none" for name in TOOL_FIELDS)
    parser.has_audio |= bool(body.get("audio")) or "audio" in str(body.get("modalities", ""))
    return ChatRequest(
        body,
        messages,
        tuple(parser.images),
        parser.prompt_tokens,
        parser.non_ascii_bytes,
        parser.has_tools,
        parser.has_audio,
        parser.has_other_parts,
    )


def parse_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Parse the messages of a body. Raises `ApiError` (400)."""
    return _Parser(UNLIMITED).parse(messages)


class _Parser:
    """Parser of messages that adds up what the limits and the token estimate count."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._text_characters = self._image_bytes = 0
        self._prompt_characters = self._other_parts = 0
        self.images: list[ImagePart] = []
        self.non_ascii_bytes = 0
        self.has_tools = self.has_audio = self.has_other_parts = False

    @property
    def prompt_tokens(self) -> int:
        images = sum(image.tokens for image in self.images)
        texts = int(self._prompt_characters / CHARACTERS_PER_TOKEN)
        return texts + images + OTHER_PART_TOKENS * self._other_parts

    def parse(self, messages: object) -> tuple[ChatMessage, ...]:
        if not isinstance(messages, list):
            wrong_type("messages", "an array of objects", messages)
        if not messages:
            raise invalid(
                "Invalid 'messages': empty array. Expected at least 1.", "messages", "empty_array"
            )
        if len(messages) > self._limits.messages:
            above_limit(
                "messages",
                f"more than {plural(self._limits.messages, 'message')}",
                "array_above_max_length",
            )
        return tuple([self._message(message, number) for number, message in enumerate(messages)])

    def add_json(self, value: object) -> None:
        """Count a JSON value that servers write into the prompt."""
        if value:
            self._add_text(orjson.dumps(value).decode())

    def _message(self, message: object, number: int) -> ChatMessage:
        if not isinstance(message, dict):
            wrong_type(f"messages[{number}]", "an object", message)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            require(message, "role", f"messages[{number}]")
            param = f"messages[{number}].role"
            expected = ", ".join(sorted(ROLES))
            raise invalid(f"Invalid '{param}': expected one of {expected}.", param, "invalid_value")
        content = message.get("content")
        parts: tuple[Part, ...] | None = None
        if isinstance(content, str):
            self._add_content(content, "messages[{}].content", number)
            parts = (TextPart(content, {"type": "text", "text": content}),)
        elif isinstance(content, list):
            where = f"messages[{number}].content"
            if not content:
                raise invalid(f"Invalid '{where}': empty array.", where, "empty_array")
            parts = tuple([self._part(part, f"{where}[{i}]") for i, part in enumerate(content)])
        elif content is not None:
            wrong_type(f"messages[{number}].content", "a string or an array of objects", content)
        elif role not in ROLES_WITHOUT_CONTENT:
            require(message, "content", f"messages[{number}]")
        if message.get("tool_calls") or message.get("function_call") or role in TOOL_ROLES:
            self.has_tools = True
        # Servers also write reasoning, names and refusals into the prompt.
        if len(message) > 2 or "content" not in message:
            self._add_fields(message, ("content", "role"), f"messages[{number}]")
        return ChatMessage(role, parts, message)

    def _part(self, part: object, where: str) -> Part:
        if not isinstance(part, dict):
            wrong_type(where, "an object", part)
        kind = part.get("type")
        if kind == "text":
            if not isinstance(text := part.get("text"), str):
                require(part, "text", where)
                wrong_type(f"{where}.text", "a string", text)
            self._add_content(text, "{}.text", where)
            if len(part) > 2:
                self._add_fields(part, ("type", "text"), where)
            return TextPart(text, part)
        if kind == "image_url":
            require(part, "image_url", where)
            image = self._image(part, f"{where}.image_url")
            if len(part) > 2:
                self._add_fields(part, ("type", "image_url"), where)
            return image
        if not isinstance(kind, str):
            require(part, "type", where)
            wrong_type(f"{where}.type", "a string", kind)
        if kind != "refusal":
            _check_addresses(part, where)
        self._add_fields(part, ("type",), where, kind if kind in MEDIA_PARTS else "")
        self._other_parts += 1
        self.has_audio |= kind == "input_audio"
        self.has_other_parts |= kind != "input_audio"
        return OtherPart(kind, where, part)

    def _image(self, part: JSONDict, where: str) -> ImagePart:
        reference, detail = part["image_url"], None
        if isinstance(reference, dict):
            url, param = reference.get("url"), f"{where}.url"
            if url is None:
                require(reference, "url", where)
            detail = reference.get("detail")
            if detail is not None and not isinstance(detail, str):
                wrong_type(f"{where}.detail", "a string", detail)
            if len(reference) > 1 + ("detail" in reference):
                self._check_fields(reference, where)
        else:
            url, param = reference, where
        if not isinstance(url, str):
            expected = "a string" if url is not reference else "an object or a string"
            wrong_type(param, expected, url)
        image = ImagePart(url, detail, param, part)
        self._add_image(image)
        return image

    def _add_image(self, image: ImagePart) -> None:
        scheme = image.url[:8].lower()
        is_inline = scheme.startswith("data:")
        if not is_inline and not scheme.startswith(("http://", "https://")):
            raise image_error(
                f"Invalid '{image.param}': only data:, http:// and https:// URLs are images here.",
                image.param,
                "send the image as data:image/png;base64,...",
            )
        self.images.append(image)
        if len(self.images) > self._limits.images:
            above_limit(image.param, f"more than {plural(self._limits.images, 'image')}")
        if is_inline:
            self._image_bytes += len(image.url) * 3 // 4
            if self._image_bytes > self._limits.image_mb * MB:
                problem = f"images of more than {self._limits.image_mb} MB together"
                above_limit(image.param, problem)

    def _add_content(self, text: str, where: str, position: object) -> None:
        self._text_characters += len(text)
        if self._text_characters > (limit := self._limits.text_characters):
            problem = f"more than {plural(limit, 'character', ',')} of text"
            above_limit(where.format(position), problem, "string_above_max_length")
        self._add_text(text)

    def _add_fields(
        self, found: JSONDict, without: Sequence[str], where: str, media: str = ""
    ) -> None:
        """Check the fields that are not read elsewhere, and count all but `media` as text."""
        self._check_fields(found, where, without)
        for name, value in found.items():
            if name in without or name == media:
                continue
            if isinstance(value, str):
                self._add_text(value)
            elif isinstance(value, dict | list):
                self.add_json(value)

    def _check_fields(self, found: JSONDict, where: str, without: Sequence[str] = ()) -> None:
        for name, value in found.items():
            if name not in without and isinstance(value, dict | list):
                _check_depth(value, f"{where}.{name}", self._limits.depth)
        if "name" in found and not isinstance(found["name"], str | None):
            wrong_type(f"{where}.name", "a string", found["name"])

    def _add_text(self, text: str) -> None:
        self._prompt_characters += len(text)
        if not text.isascii():
            self.non_ascii_bytes += non_ascii_bytes(text)


def _check_depth(value: object, where: str, depth: int) -> None:
    # Layer by layer, since recursion would itself end at some depth.
    layer = [value]
    for _ in range(depth):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return
    above_limit(where, f"brackets nested deeper than {depth}")


def _check_addresses(part: JSONDict, where: str) -> None:
    """Reject URLs in other parts: servers fetch videos and documents from any address."""
    for name, value in part.items():
        inner = [value, *(value.values() if isinstance(value, dict) else ())]
        if any(isinstance(one, str) and ADDRESS.match(one) for one in inner):
            param = f"{where}.{name}"[:MAX_NAME]
            raise ApiError(
                f"Invalid '{param}': only images are fetched by their URL.",
                code="url_not_fetched",
                param=param,
                hint="send the content itself, as base64",
            )


def max_text_tokens(value: object) -> int:
    """Return a cautious estimate of the tokens in the text of a JSON value."""
    text = orjson.dumps(value).decode()
    return int(len(text) / CHARACTERS_PER_TOKEN) + non_ascii_bytes(text)


def non_ascii_bytes(text: str) -> int:
    """Return the UTF-8 bytes of the text's characters outside ASCII."""
    if text.isascii():
        return 0
    return len(text.encode("utf-8", "surrogatepass").translate(None, ASCII))


def data_url_cache() -> DataUrl:
    """Return a function that encodes images as data URLs and caches the results by content: the
    same examples are shown repeatedly, and a knowledge base returns new objects for each query."""
    encoded: LRUCache[str, str] = LRUCache(KEEP_ENCODED, size=len)

    def data_url(image: Image) -> str:
        url = encoded.get(image.sha256)
        if url is None:
            encoded.put(image.sha256, url := image.data_url)
        return url

    return data_url


def sampling_fields(sampling: Sampling) -> dict[str, object]:
    """Return the sampling parameters as fields of a body, None for those to leave out."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n if sampling.n > 1 else None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }


def messages_json(messages: Sequence[Message], data_url: DataUrl) -> list[dict[str, object]]:
    """Return the messages of a prompt as JSON, images as data URLs. Blocks: encodes images."""
    rows: list[dict[str, object]] = []
    for message in messages:
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in message.parts
        ]
        is_plain = len(parts) == 1 and parts[0]["type"] == "text"
        rows.append({"role": message.role, "content": parts[0]["text"] if is_plain else parts})
    return rows


def require(found: Mapping[str, object], name: str, where: str) -> None:
    if found.get(name) is None:
        param = f"{where}.{name}" if where else name
        raise invalid(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
