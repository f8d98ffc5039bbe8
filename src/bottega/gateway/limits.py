"""Limits of one request, and the images of a request: decoded, or fetched where allowed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import orjson

from bottega.errors import ImageError, TooManyPixelsError
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

MB = 1 << 20
UNIQUE_HEADERS = (b"authorization", b"x-bottega-")
WEB_SCHEMES = ("http://", "https://")
Fetch = Callable[[str], Awaitable[Image]]


@dataclass(frozen=True)
class Limits(BodyLimits):
    """Limits of one request. `image_mb` is the total size of its images, decoded from base64 or
    fetched; `image_pixels` applies to each, `request_pixels` to all of them together."""

    body_mb: int = 20
    image_pixels: int = 40_000_000
    request_pixels: int = 50_000_000
    header_bytes: int = 32_768
    headers: int = 100

    def check_size(self, size: int) -> None:
        """Raise `ApiError` (413) if a stated or received length is too large."""
        if size > self.body_mb * MB:
            raise ApiError(
                f"The request is larger than {self.body_mb} MB.",
                status=413,
                code="request_too_large",
                hint="send fewer or smaller images",
            )

    def check_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `ApiError` for too many or too large headers, and for a duplicate of a header that
        gives rights: a proxy may have validated the other copy."""
        pairs = list(headers)
        sizes = [len(name) + len(value) for name, value in pairs]
        if len(sizes) > self.headers or sum(sizes) > self.header_bytes:
            raise ApiError(
                f"The headers are more than {self.headers} or larger than"
                f" {self.header_bytes:,} bytes.",
                status=431,
                code="headers_too_large",
                hint="send fewer or shorter headers",
            )
        if len({name for name, _ in pairs}) < len(pairs):
            for name, count in Counter(name for name, _ in pairs).items():
                if count > 1 and name.startswith(UNIQUE_HEADERS):
                    raise ApiError(
                        f"The header {name.decode('latin-1')[:100]!r} occurs twice.",
                        code="duplicate_header",
                        hint="send it once",
                    )

    def read(self, raw: bytes) -> ChatRequest:
        """Return the parsed body. Raises `ApiError`.

        Of duplicate names the last one counts, here and upstream: the body that is sent on is
        written from the parsed one.
        """
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
        return parse_request(body, self)

    def read_image(self, url: str, param: str) -> Image:
        """Return the image of a data URL, whose size `read` has checked. Blocks: decodes. Raises
        `ApiError`."""
        try:
            image = Image.from_data_url("data:" + url[5:])
        except TooManyPixelsError as error:
            most = min(self.image_pixels, MAX_PIXELS)
            message = f"The image has more than {most:,} pixels."
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
    images and for URLs that may not be fetched."""
    params: dict[str, str] = {}
    for part in parts:
        params.setdefault(part.url, part.param)
    inline = [url for url in params if not is_web(url)]
    found = await asyncio.to_thread(_decode_all, inline, params, limits) if inline else {}
    web = [url for url in params if is_web(url)]
    if web and fetch is None:
        raise ApiError(
            "image URLs are not fetched here",
            code="image_url_not_fetched",
            param=params[web[0]],
            hint="send the image as a data URL (data:image/png;base64,...)",
        )
    if web and fetch is not None:
        fetched = await asyncio.gather(*(_fetch(url, params[url], fetch, limits) for url in web))
        found |= dict(zip(web, fetched, strict=True))
    return found


def _decode_all(urls: Sequence[str], params: Mapping[str, str], limits: Limits) -> dict[str, Image]:
    return {url: _decode(url, params[url], limits) for url in urls}


def _decode(url: str, param: str, limits: Limits) -> Image:
    kind, comma, _ = url.partition(",")
    if not (kind[:11].lower() == "data:image/" and kind.lower().endswith(";base64") and comma):
        raise image_error(
            "an image_url is neither an http(s) URL nor a data URL",
            param,
            "send data:image/png;base64,...",
        )
    return limits.read_image(url, param)


async def _fetch(url: str, param: str, fetch: Fetch, limits: Limits) -> Image:
    with _set_param(param):
        image = await fetch(url)
        limits.check_image(image, param)
        return image


@contextmanager
def _set_param(param: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        error.param = param
        raise


def embed_fetched(request: ChatRequest, found: Mapping[str, Image]) -> ChatRequest:
    """Return the request with data URLs of the fetched images in its body, since tiers never fetch.
    Its parts keep the original URLs. Blocks: encodes images."""
    urls = {url: image.data_url for url, image in found.items() if is_web(url)}
    messages = [_with_urls(message, urls) for message in request.messages]
    return replace(request, body=request.with_messages(messages))


def _with_urls(message: ChatMessage, urls: Mapping[str, str]) -> Body:
    if not any(image.url in urls for image in message.images):
        return message.raw
    parts = [
        _with_url(part, urls) if isinstance(part, ImagePart) else part.raw
        for part in message.parts or ()
    ]
    return {**message.raw, "content": parts}


def _with_url(part: ImagePart, urls: Mapping[str, str]) -> Body:
    reference = part.raw["image_url"]
    other = reference if isinstance(reference, Mapping) else {}
    return {**part.raw, "image_url": {**other, "url": urls.get(part.url, part.url)}}
