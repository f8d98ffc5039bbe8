"""What a client may send. Everything else is refused by the name of its field, before it costs
anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import orjson

from bottega.errors import ImageError, TooManyPixelsError
from bottega.gateway.fields import (
    FIELDS,
    LONGEST_NAME,
    ROLES,
    SPEECHLESS,
    bad_image,
    bad_role,
    invalid,
    required,
    too_much,
    wrong_type,
)
from bottega.gateway.ports import Body
from bottega.image import MAX_PIXELS, Image
from bottega.openai_api.errors import ApiError

MB = 1 << 20
ONCE = (b"authorization", b"x-bottega-")
ADDRESS = re.compile(r"\s*(?!data:)[a-z][a-z0-9+.-]*:/", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """Limits of one request. `image_mb` is the total size of its images, decoded from base64 or
    fetched; `image_pixels` applies to each, `request_pixels` to all of them together. `depth`
    counts nested brackets."""

    body_mb: int = 20
    messages: int = 200
    text_characters: int = 1_000_000
    images: int = 16
    image_mb: int = 20
    image_pixels: int = 40_000_000
    request_pixels: int = 50_000_000
    header_bytes: int = 32_768
    headers: int = 100
    depth: int = 64

    def check_size(self, size: int) -> None:
        """For a stated length and for the bytes that came so far."""
        if size > self.body_mb * MB:
            raise ApiError(
                f"The request is larger than {self.body_mb} MB.",
                status=413,
                code="request_too_large",
                hint="send fewer or smaller images",
            )

    def check_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Of a key that stands twice somebody may have checked the other one."""
        named = list(headers)
        sizes = [len(name) + len(value) for name, value in named]
        if len(sizes) > self.headers or sum(sizes) > self.header_bytes:
            raise ApiError(
                f"The headers are more than {self.headers} or larger than"
                f" {self.header_bytes:,} bytes.",
                status=431,
                code="headers_too_large",
                hint="send fewer or shorter headers",
            )
        if len({name for name, _ in named}) < len(named):
            for name, count in Counter(name for name, _ in named).items():
                if count > 1 and name.startswith(ONCE):
                    raise ApiError(
                        f"The header {name.decode('latin-1')[:100]!r} stands there twice.",
                        code="duplicate_header",
                        hint="send it once",
                    )

    def read(self, raw: bytes) -> Body:
        """Parsed and checked. Of a name that stands twice the last counts, for the checks as for
        whatever is sent on: the body that goes upstream must be written anew from this one."""
        self.check_size(len(raw))
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(
                f"We could not parse the JSON body of your request: {error}.",
                status=400,
                code="invalid_json",
                hint="send one JSON object in UTF-8, without NaN or Infinity",
            ) from error
        self.check(body)
        return cast(Body, body)

    def check(self, body: object) -> None:
        """Raises `ApiError` (400) for what is not a chat-completions body within the limits. Fields
        that nobody knows may hold anything that is not nested deeper than `depth`."""
        if not isinstance(body, dict):
            wrong_type("", "an object", body)
        for name, value in body.items():
            if value is None or name == "messages":
                continue
            if (kind := FIELDS.get(name)) and not kind.fits(value):
                kind.reject(name, value)
            if isinstance(value, dict | list):
                self._check_depth(value, name)
        required(body, "model", "")
        required(body, "messages", "")
        self._check_messages(body["messages"])

    def read_image(self, url: str, param: str) -> Image:
        """Of a data URL; what it weighs is among what `check` has added up. Not for the event
        loop."""
        try:
            image = Image.from_data_url("data:" + url[5:])
        except TooManyPixelsError as error:
            most = min(self.image_pixels, MAX_PIXELS)
            said = f"The image has more than {most:,} pixels."
            raise bad_image(said, param, error.hint) from error
        except ImageError as error:
            raise bad_image(f"Invalid image: {error}.", param, error.hint) from error
        self.check_image(image, param)
        return image

    def check_image(self, image: Image, param: str) -> None:
        if image.width * image.height > self.image_pixels:
            raise bad_image(
                f"The image has {image.width} x {image.height} pixels, more than"
                f" {self.image_pixels:,}.",
                param,
                "reduce the image first",
            )

    def check_fetched(self, images: Collection[Image], param: str) -> None:
        """Once those behind http(s) URLs are there too. What is one colour weighs next to nothing,
        and is decoded like any other."""
        for image in images:
            self.check_image(image, param)
        pixels = sum(image.width * image.height for image in images)
        if pixels > self.request_pixels:
            too_much(param, f"images of more than {self.request_pixels:,} pixels together")
        if sum(len(image.data) for image in images) > self.image_mb * MB:
            too_much(param, f"images of more than {self.image_mb} MB together")

    def _check_messages(self, messages: object) -> None:
        if not isinstance(messages, list):
            wrong_type("messages", "an array of objects", messages)
        if not messages:
            raise invalid(
                "Invalid 'messages': empty array. Expected at least 1.", "messages", "empty_array"
            )
        if len(messages) > self.messages:
            too_much("messages", f"more than {self.messages} messages", "array_above_max_length")
        count = _Count(self)
        for number, message in enumerate(messages):
            self._check_message(message, number, count)

    def _check_message(self, message: object, number: int, count: _Count) -> None:
        if not isinstance(message, dict):
            wrong_type(f"messages[{number}]", "an object", message)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            bad_role(message, number)
        content = message.get("content")
        if isinstance(content, str):
            count.text(content, "messages[{}].content", number)
        elif isinstance(content, list):
            self._check_parts(content, f"messages[{number}].content", count)
        elif content is not None:
            wrong_type(f"messages[{number}].content", "a string or an array of objects", content)
        elif role not in SPEECHLESS:
            required(message, "content", f"messages[{number}]")
        self._check_rest(message, ("content", "role"), f"messages[{number}]")

    def _check_parts(self, parts: list[object], where: str, count: _Count) -> None:
        if not parts:
            raise invalid(f"Invalid '{where}': empty array.", where, "empty_array")
        for number, part in enumerate(parts):
            here = f"{where}[{number}]"
            if not isinstance(part, dict):
                wrong_type(here, "an object", part)
            known: tuple[str, ...] = ("type",)
            kind = part.get("type")
            if kind == "text":
                required(part, "text", here)
                if not isinstance(text := part["text"], str):
                    wrong_type(f"{here}.text", "a string", text)
                count.text(text, "{}.text", here)
            elif kind == "image_url":
                required(part, "image_url", here)
                self._check_image_url(part["image_url"], f"{here}.image_url", count)
                known += ("image_url",)
            elif not isinstance(kind, str):
                required(part, "type", here)
                wrong_type(f"{here}.type", "a string", kind)
            elif kind != "refusal":
                _check_addresses(part, here)
            self._check_rest(part, known, here)

    def _check_image_url(self, reference: object, where: str, count: _Count) -> None:
        if isinstance(reference, dict):
            required(reference, "url", where)
            url, here = reference["url"], f"{where}.url"
            detail = reference.get("detail")
            if detail is not None and not isinstance(detail, str):
                wrong_type(f"{where}.detail", "a string", detail)
            self._check_rest(reference, ("url",), where)
        else:
            url, here = reference, where
        if not isinstance(url, str):
            wrong_type(here, "a string" if url is not reference else "an object or a string", url)
        count.image(url, here)

    def _check_rest(self, found: dict[str, object], known: tuple[str, ...], where: str) -> None:
        for name, value in found.items():
            if name not in known and isinstance(value, dict | list):
                self._check_depth(value, f"{where}.{name}")
        if "name" in found and not isinstance(found["name"], str | None):
            wrong_type(f"{where}.name", "a string", found["name"])

    def _check_depth(self, value: object, where: str) -> None:
        # Whole layers, since recursion would itself end at some depth.
        layer = [value]
        for _ in range(self.depth):
            layer = [
                inner
                for outer in layer
                for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
                if isinstance(inner, dict | list)
            ]
            if not layer:
                return
        too_much(where, f"brackets nested deeper than {self.depth}")


def _check_addresses(part: dict[str, object], where: str) -> None:
    """Servers fetch videos and documents by their URL, from wherever they stand."""
    for name, value in part.items():
        inner = [value, *(value.values() if isinstance(value, dict) else ())]
        if any(isinstance(one, str) and ADDRESS.match(one) for one in inner):
            where = f"{where}.{name}"[:LONGEST_NAME]
            raise ApiError(
                f"Invalid '{where}': only images are fetched by their URL.",
                code="url_not_fetched",
                param=where,
                hint="send what is there, as base64",
            )


class _Count:
    """What is added up over all messages."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._characters = self._images = self._bytes = 0

    def text(self, text: str, where: str, named: object) -> None:
        self._characters += len(text)
        if self._characters > (most := self._limits.text_characters):
            what = f"more than {most:,} characters of text"
            too_much(where.format(named), what, "string_above_max_length")

    def image(self, url: str, where: str) -> None:
        scheme = url[:8].lower()
        inline = scheme.startswith("data:")
        if not inline and not scheme.startswith(("http://", "https://")):
            raise bad_image(
                f"Invalid '{where}': only data:, http:// and https:// URLs are images here.",
                where,
                "send the image as data:image/png;base64,...",
            )
        self._images += 1
        if self._images > self._limits.images:
            too_much(where, f"more than {self._limits.images} images")
        if inline:
            self._bytes += len(url) * 3 // 4
            if self._bytes > self._limits.image_mb * MB:
                too_much(where, f"images of more than {self._limits.image_mb} MB together")
