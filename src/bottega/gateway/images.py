"""The images of a request, decoded off the event loop, fetched only where that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from bottega.gateway.fields import bad_image
from bottega.gateway.limits import Limits
from bottega.gateway.ports import Body
from bottega.gateway.requests import Part
from bottega.image import Image
from bottega.openai_api.errors import ApiError

Fetch = Callable[[str], Awaitable[Image]]
WEB = ("http://", "https://")


def is_web(url: str) -> bool:
    return url[:8].lower().startswith(WEB)


async def pictures(
    parts: Sequence[Part], fetch: Fetch | None, limits: Limits, body: Body
) -> dict[str, Image]:
    """By URL. Raises `ApiError` for what is no image, or not to be fetched, by its place in the
    body."""
    urls = list(dict.fromkeys(part.url for part in parts))
    here = [url for url in urls if not is_web(url)]
    found = await asyncio.to_thread(_decoded, here, limits, body) if here else {}
    web = [url for url in urls if is_web(url)]
    if web and fetch is None:
        raise ApiError(
            "image URLs are not fetched here",
            code="image_url_not_fetched",
            param=place_of(web[0], body),
            hint="send the image as a data URL (data:image/png;base64,...)",
        )
    if web and fetch is not None:
        fetched = await asyncio.gather(*(_fetched(url, fetch, limits, body) for url in web))
        found |= dict(zip(web, fetched, strict=True))
    return found


def place_of(url: str, body: Body) -> str:
    """As `Limits` names it, which goes by what clients write."""
    for i, message in enumerate(cast(list[dict[str, Any]], body["messages"])):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            image, where = part.get("image_url"), f"messages[{i}].content[{j}].image_url"
            if image == url:
                return where
            if isinstance(image, Mapping) and image.get("url") == url:
                return f"{where}.url"
    return "messages"


def _decoded(urls: Sequence[str], limits: Limits, body: Body) -> dict[str, Image]:
    found = {}
    for url in urls:
        with _naming(url, body):
            found[url] = _decode(url, limits)
    return found


def _decode(url: str, limits: Limits) -> Image:
    kind, comma, _ = url.partition(",")
    if not (kind[:11].lower() == "data:image/" and kind.lower().endswith(";base64") and comma):
        raise bad_image(
            "an image_url is neither an http(s) URL nor a data URL",
            "messages",
            "data:image/png;base64,...",
        )
    return limits.read_image(url, "messages")


async def _fetched(url: str, fetch: Fetch, limits: Limits, body: Body) -> Image:
    with _naming(url, body):
        image = await fetch(url)
        limits.check_image(image, "messages")
        return image


@contextmanager
def _naming(url: str, body: Body) -> Iterator[None]:
    """Its place is looked for when something is wrong with it alone."""
    try:
        yield
    except ApiError as error:
        error.param = place_of(url, body)
        raise


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
