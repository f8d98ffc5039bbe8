"""The images of a request, decoded off the event loop, fetched only where that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from bottega.errors import ImageError
from bottega.gateway.ports import Body
from bottega.gateway.refusals import Refusal
from bottega.gateway.requests import Part
from bottega.image import Image

Fetch = Callable[[str], Awaitable[Image]]
WEB = ("http://", "https://")


def is_web(url: str) -> bool:
    return url[:8].lower().startswith(WEB)


async def pictures(parts: Sequence[Part], fetch: Fetch | None) -> dict[str, Image]:
    """By URL. Raises `Refusal` for what is no image, or not to be fetched."""
    urls = list(dict.fromkeys(part.url for part in parts))
    here = [url for url in urls if not is_web(url)]
    found = await asyncio.to_thread(_decoded, here) if here else {}
    web = [url for url in urls if is_web(url)]
    if web and fetch is None:
        raise Refusal(
            "image URLs are not fetched here",
            code="image_url_not_fetched",
            param="messages",
            hint="send the image as a data URL (data:image/png;base64,...)",
        )
    if web and fetch is not None:
        found |= dict(zip(web, await asyncio.gather(*map(fetch, web)), strict=True))
    return found


def _decoded(urls: Sequence[str]) -> dict[str, Image]:
    return {url: _decode(url) for url in urls}


def _decode(url: str) -> Image:
    kind, comma, _ = url.partition(",")
    if not (kind[:11].lower() == "data:image/" and kind.lower().endswith(";base64") and comma):
        raise Refusal(
            "an image_url is neither an http(s) URL nor a data URL",
            code="invalid_image",
            param="messages",
            hint="data:image/png;base64,...",
        )
    try:
        return Image.from_data_url(url)
    except ImageError as error:
        raise Refusal(
            str(error), code="invalid_image", param="messages", hint=error.hint
        ) from error


def with_fetched(body: Body, found: Mapping[str, Image]) -> Body:
    """The body with what was fetched in the place of its web URLs: a tier never fetches."""
    fetched = {url: image.data_url for url, image in found.items() if is_web(url)}
    return {**body, "messages": _replaced(body["messages"], fetched)}


def _replaced(value: Any, urls: Mapping[str, str]) -> Any:
    messages = cast(list[dict[str, Any]], value)
    return [
        {**message, "content": [_part(part, urls) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: dict[str, Any], urls: Mapping[str, str]) -> dict[str, Any]:
    image = part.get("image_url")
    if isinstance(image, str):
        return {**part, "image_url": {"url": urls.get(image, image)}}
    if isinstance(image, Mapping):
        url = str(image.get("url"))
        return {**part, "image_url": {**image, "url": urls.get(url, url)}}
    return part
