"""Reading of a request: origin, limits, images, overrides, and the query for examples."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from bottega._util.identity import ID_LENGTH, json_digest
from bottega.errors import ImageError, TooManyPixelsError
from bottega.gateway.ports import Receive
from bottega.gateway.state.response_cache import TRANSPORT_FIELDS
from bottega.image import MAX_PIXELS, Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.fields import above_limit, image_error
from bottega.openai_api.request import (
    Body,
    BodyLimits,
    ChatMessage,
    ChatRequest,
    ImagePart,
    parse_request,
)
from bottega.types import Query


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the key in the Authorization header or, as Anthropic's clients send it, in x-api-key;
    empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


MB = 1 << 20
UNIQUE_HEADERS = (b"authorization", b"x-bottega-")
WEB_SCHEMES = ("http://", "https://")
Fetch = Callable[[str], Awaitable[Image]]


def too_large(subject: str, limit: str, hint: str) -> ApiError:
    return ApiError(
        f"{subject} is larger than {limit}",
        status=413,
        code="body_too_large",
        headers={"connection": "close"},
        hint=hint,
    )


def limited(receive: Receive, max_bytes: int, error: ApiError) -> Receive:
    """Return a `receive` that raises the error after more than `max_bytes`."""
    received = 0

    async def receive_limited() -> Any:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise error
        return message

    return receive_limited


@dataclass(frozen=True)
class Limits(BodyLimits):
    """Limits of one request. `image_mb` is the total size of its images, decoded from base64 or
    fetched; `image_pixels` applies to each, `request_pixels` to all of them together."""

    body_mb: int = 20
    image_pixels: int = 50_000_000
    request_pixels: int = 50_000_000
    header_bytes: int = 32_768
    headers: int = 100

    def check_size(self, size: int) -> None:
        """Raise `ApiError` (413) if a stated or received length is too large."""
        if size > self.body_mb * MB:
            raise self.too_large

    @property
    def too_large(self) -> ApiError:
        return too_large("the body", f"{self.body_mb} MB", "send fewer or smaller images")

    def check_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `ApiError` for too many or too large headers, and for a duplicate of a header that
        gives rights: a proxy may have validated the other copy."""
        pairs = list(headers)
        sizes = [len(name) + len(value) for name, value in pairs]
        if len(sizes) > self.headers or sum(sizes) > self.header_bytes:
            raise ApiError(
                f"the request must have at most {self.headers} headers and"
                f" {self.header_bytes:,} bytes of them, got {len(sizes)} and {sum(sizes):,}",
                status=431,
                code="headers_too_large",
                hint="send fewer or shorter headers",
            )
        if len({name for name, _ in pairs}) < len(pairs):  # rare, so count only then
            for name, count in Counter(name for name, _ in pairs).items():
                if count > 1 and name.startswith(UNIQUE_HEADERS):
                    raise ApiError(
                        f"the header {name.decode('latin-1')[:100]!r} must occur once, got {count}",
                        code="duplicate_header",
                        hint="send it once",
                    )

    def read(self, raw: bytes) -> ChatRequest:
        """Return the parsed body. Raises `ApiError`.

        Of duplicate names the last one counts, here and upstream: the body that is sent on is
        written from the parsed one.
        """
        return parse_request(self.parse(raw), self)

    def parse(self, raw: bytes) -> object:
        self.check_size(len(raw))
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(
                f"We could not parse the JSON body of your request: {error}.",
                status=400,
                code="invalid_json",
                hint="send one JSON object in UTF-8, without NaN or Infinity",
            ) from error

    def read_image(self, url: str, param: str) -> Image:
        """Return the image of a data URL, whose size `read` has checked. Blocks: decodes. Raises
        `ApiError`."""
        try:
            image = Image.from_data_url(url)
        except TooManyPixelsError as error:
            max_pixels = min(self.image_pixels, MAX_PIXELS)
            message = f"The image has more than {max_pixels:,} pixels."
            raise image_error(message, param, error.hint) from error
        except ImageError as error:
            raise image_error(f"Invalid image: {error}.", param, error.hint) from error
        self.check_image(image, param)
        return image

    def check_image(self, image: Image, param: str) -> None:
        if image.width * image.height > self.image_pixels:
            raise image_error(
                f"The image has {image.width} x {image.height} pixels, more than"
                f" {self.image_pixels:,}.",
                param,
                "reduce the image first",
            )

    def check_fetched(self, images: Collection[Image], param: str) -> None:
        """Check all images of a request, fetched ones included: a large image of one colour has few
        bytes, but as many pixels to decode as any other."""
        for image in images:
            self.check_image(image, param)
        pixels = sum(image.width * image.height for image in images)
        if pixels > self.request_pixels:
            above_limit(param, f"images of more than {self.request_pixels:,} pixels together")
        if sum(len(image.data) for image in images) > self.image_mb * MB:
            above_limit(param, f"images of more than {self.image_mb} MB together")


def is_web(url: str) -> bool:
    """Return whether the URL must be fetched."""
    return url[:8].lower().startswith(WEB_SCHEMES)


async def read_images(
    parts: Sequence[ImagePart], fetch: Fetch | None, limits: Limits
) -> dict[str, Image]:
    """Return the images by URL. Raises `ApiError`, with the position in the body, for invalid
    images, for too many pixels or bytes together, and for URLs that may not be fetched."""
    params: dict[str, str] = {}
    for part in parts:
        params.setdefault(part.url, part.param)
    inline = [url for url in params if not is_web(url)]
    found: dict[str, Image] = {}
    if inline:
        found = await asyncio.to_thread(
            lambda: {url: _decode(url, params[url], limits) for url in inline}
        )
    web = [url for url in params if is_web(url)]
    if web:
        if fetch is None:
            raise ApiError(
                "image URLs are not fetched here",
                code="image_url_not_fetched",
                param=params[web[0]],
                hint="send the image as a data URL (data:image/png;base64,...)",
            )
        fetched = await asyncio.gather(*(_fetch(url, params[url], fetch, limits) for url in web))
        found |= dict(zip(web, fetched, strict=True))
    limits.check_fetched(found.values(), "messages")
    return found


def _decode(url: str, param: str, limits: Limits) -> Image:
    kind = url[: max(0, url.find(","))].lower()  # `partition` would copy the image, too
    if not (kind.startswith("data:image/") and kind.endswith(";base64")):
        raise image_error(
            "an image_url is neither an http(s) URL nor a data URL",
            param,
            "send data:image/png;base64,...",
        )
    return limits.read_image(url, param)


async def _fetch(url: str, param: str, fetch: Fetch, limits: Limits) -> Image:
    try:
        image = await fetch(url)
    except ApiError as error:
        error.param = param
        raise
    limits.check_image(image, param)
    return image


def embed_fetched(request: ChatRequest, found: Mapping[str, Image]) -> ChatRequest:
    """Return the request with data URLs of the fetched images in its body, since tiers never fetch.
    Its parts keep the original URLs. Blocks: encodes images."""
    urls = {url: image.data_url for url, image in found.items() if is_web(url)}
    messages = [_with_urls(message, urls) for message in request.messages]
    return replace(request, body=request.with_messages(messages))


def _with_urls(message: ChatMessage, urls: Mapping[str, str]) -> Body:
    if not any(image.url in urls for image in message.images):
        return message.raw
    parts: list[object] = []
    for part in message.parts or ():
        if isinstance(part, ImagePart):
            reference = part.raw["image_url"]
            other = reference if isinstance(reference, Mapping) else {}
            url = urls.get(part.url, part.url)
            parts.append({**part.raw, "image_url": {**other, "url": url}})
        else:
            parts.append(part.raw)
    return {**message.raw, "content": parts}


# Titles, tags and follow-ups that chat front ends request on their own.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
# Fields that change a reply no more than chance does.
TUNING = {
    *TRANSPORT_FIELDS,
    "frequency_penalty",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "seed",
    "service_tier",
    "store",
    "temperature",
    "top_logprobs",
    "top_p",
}
MAX_MILD_TEMPERATURE = 1.0  # above it, replies may differ in meaning


def to_query(request: ChatRequest, images: Sequence[Image], choices: tuple[str, ...] = ()) -> Query:
    """Return the query of the last user turn, with all images of the conversation."""
    return Query(request.question, tuple(images), choices, context=context_of(request))


def context_of(request: ChatRequest) -> str:
    """Return a digest of everything besides the conversation that the answer depends on; empty if
    there is nothing. Unknown fields count: on some servers they can determine the answer."""
    body = request.body
    instructions, output_format = request.instructions, body.get("response_format")
    control = {
        name: value
        for name in body.keys() - TUNING
        if (value := body[name]) not in (None, [], {}, "", 0)
    }
    if cast(float, body.get("temperature") or 0) > MAX_MILD_TEMPERATURE:
        control["temperature"] = "hot"
    if not instructions and output_format is None and not control:
        return ""
    parts: list[object] = [[_instruction(message) for message in instructions], output_format]
    parts += [control] if control else []
    return json_digest(parts, sort_keys=True)[:ID_LENGTH]


def _instruction(message: ChatMessage) -> object:
    images = [hashlib.sha256(image.url.encode()).hexdigest() for image in message.images]
    return [message.text, *images] if images else message.text


def bypass_reason(request: ChatRequest, background: re.Pattern[str]) -> str | None:
    """Return why a request cannot get demonstrations, None if it can."""
    if request.has_tools:
        return "tools"
    if request.has_audio:
        return "audio"
    last = request.last_user_turn
    if last is None:
        return "no question"
    if request.has_other_parts:
        return "parts"
    if background.search(request.question):
        return "background"
    return None if request.question.strip() or last.images else "empty question"
