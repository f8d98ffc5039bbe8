"""Reading of a request within limits: headers, body, fields, images, memory to decode them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from bottega._util.caching import FairSemaphore
from bottega.errors import ImageError, TooManyPixelsError
from bottega.gateway.ports import ExampleWriter, Receive
from bottega.image import MAX_PIXELS, Image
from bottega.openai_api.errors import MAX_NAME, ApiError, JSONObject, above_limit, image_error
from bottega.openai_api.request import (
    FIELDS,
    SERVICE_TIER,
    Body,
    BodyLimits,
    ChatMessage,
    ChatRequest,
    ImagePart,
    parse_request,
)
from bottega.pixels import DecodeCost
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query

# Fields of OpenAI's chat completions, without `web_search_options`: each search has a price.
OPENAI = {
    *FIELDS,
    "audio",
    "function_call",
    "messages",
    "modalities",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "tool_choice",
}
# Sampling parameters of vLLM, SGLang and llama.cpp: they only choose among tokens.
SAMPLING = {"min_p", "repeat_penalty", "repetition_penalty", "stop_token_ids", "top_k", "typical_p"}
# vLLM's output constraints. They mask tokens, as `response_format` does; its other options choose
# the code that runs (`guided_decoding_backend`) or accept a whole grammar.
CONSTRAINTS = {"guided_choice", "guided_json", "guided_regex"}
STRUCTURED = "structured_outputs"
STRUCTURED_OPTIONS = {"choice", "json", "regex"}
ALLOWED = OPENAI | SAMPLING | CONSTRAINTS
# Clients of local servers send these defaults; other values need the operator's permission.
DEFAULTS: Mapping[str, object] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "echo": False,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
# Price lists have one price per model. It applies to these service tiers.
PLAIN_TIERS = (None, "auto", "default")

MB = 1 << 20
T = TypeVar("T")
Cost = Callable[[Image], DecodeCost]
BUDGET = 256 * MB
# Embedders reduce images to less than this many pixels on a side.
REDUCED_SIDE = 512
# Upper bound for every codec, result included (JPEG 2000 of 16 bits): with few pixels the header
# need not be read.
BYTES_PER_PIXEL = 66
# The same for JPEG: the coefficients of four components and three copies of the result.
JPEG_BYTES_PER_PIXEL = 20
JPEG_TYPES = ("image/jpeg", "image/mpo")
# Work that needs at most this much does not wait for larger work.
SMALL = 16 * MB
SMALL_BUDGET = 64 * MB
WAIT_SECONDS = 10.0
Timer = Callable[[], AbstractContextManager[None]]
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


def embedding_cost(image: Image) -> DecodeCost:
    return image.decode_cost(REDUCED_SIDE)


class DecodeBudget:
    """Budget of at most `max_bytes` of decoded images at a time, estimated from their headers,
    plus up to 64 MB of small images, which never wait for large ones. Large images are also
    limited to half of the processors, to leave the rest to other requests."""

    def __init__(self, max_bytes: int = BUDGET, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.wait_seconds = wait_seconds
        processors = os.cpu_count() or 1
        self._large = FairSemaphore(max_bytes, max(1, processors // 2))
        self._small = FairSemaphore(SMALL_BUDGET, max(2, processors))

    async def check(self, images: Collection[Image]) -> None:
        """Raise `ApiError` (413) for images that exceed the whole budget."""
        need = max_bytes_needed(images)
        if need > self.max_bytes:
            need = await asyncio.to_thread(bytes_needed, images)
        if need > self.max_bytes:
            raise ApiError(
                f"the images of the request must decode within {self.max_bytes // MB} MB, got"
                f" {need // MB} MB",
                status=413,
                code="images_too_large",
                param="messages",
                hint="reduce the images first, or send them as JPEG",
            )

    async def run(
        self,
        images: Collection[Image],
        work: Callable[[], Awaitable[T]],
        cost: Cost = embedding_cost,
    ) -> T:
        """Run `work`, which decodes the images at `cost` each, once there is memory for them.
        Raises `ApiError` (429) after `wait_seconds`.

        The memory is released when the work has ended, not when the client leaves: a decoding
        thread cannot be stopped.
        """
        if not images:
            return await work()
        need = max_bytes_needed(images)
        if need > SMALL:
            need = await asyncio.to_thread(bytes_needed, images, cost)
        need = min(need, self.max_bytes)  # work above the budget waits until it is alone
        lane = self._small if need <= min(SMALL, self.max_bytes) else self._large
        try:
            client = await lane.acquire(need, self.wait_seconds)
        except TimeoutError:
            raise ApiError(
                "the gateway has no memory left for decoding images",
                status=429,
                code="decoding_busy",
                headers={"retry-after": "2"},
                hint="try again in a moment, or send smaller images",
            ) from None

        def release(task: asyncio.Future[T]) -> None:
            lane.release(need, client)
            if not task.cancelled():
                task.exception()  # retrieve it: no caller does after the client has left

        running = asyncio.ensure_future(work())
        running.add_done_callback(release)
        return await asyncio.shield(running)


def max_bytes_needed(images: Collection[Image]) -> int:
    """Return an upper bound of `bytes_needed` for any cost. It suffices for most images, while
    reading their headers needs a thread."""
    return sum(
        (JPEG_BYTES_PER_PIXEL if image.media_type in JPEG_TYPES else BYTES_PER_PIXEL)
        * (image.width * image.height)
        for image in images
    )


def bytes_needed(images: Collection[Image], cost: Cost = embedding_cost) -> int:
    """Estimate the peak in bytes of decoding the images one by one and keeping the results."""
    costs = [cost(image) for image in images]
    return max((one.peak for one in costs), default=0) + sum(one.result for one in costs)


class BudgetedRetriever:
    """Retriever whose embedder decodes the query's images within the budget. `timer` measures the
    retrieval without the wait for memory."""

    def __init__(
        self, retrieve: Retriever, budget: DecodeBudget, timer: Timer = nullcontext
    ) -> None:
        self._retrieve, self._budget, self._timer = retrieve, budget, timer

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        async def work() -> list[Candidate]:
            with self._timer():
                return await self._retrieve(query, k)

        return await self._budget.run(query.images, work)


class BudgetedExampleWriter:
    """ExampleWriter that stores an example while its images are decoded within the budget."""

    def __init__(
        self, writer: ExampleWriter, budget: DecodeBudget, timer: Timer = nullcontext
    ) -> None:
        self._writer, self._budget, self._timer = writer, budget, timer

    async def store(self, example: Example, /, *, pin: bool = False) -> str | None:
        async def work() -> str | None:
            with self._timer():
                return await self._writer.store(example, pin=pin)

        return await self._budget.run(example.query.images, work)


def allowed_fields(body: JSONObject, more: Collection[str] = ()) -> JSONObject:
    """Return the body without fields at their `DEFAULTS`. Raise `ApiError` for a field that is not
    allowed; `more` are fields that the operator allows. Other fields may change what a server does
    or costs: chat templates, priorities, logits processors. A null field counts as absent."""
    # True == 1 in Python, so compare the types; JavaScript writes 1.0 as 1.
    dropped = {
        name
        for name in body.keys() & DEFAULTS.keys()
        if name not in more
        and body[name] == DEFAULTS[name]
        and isinstance(body[name], bool) is isinstance(DEFAULTS[name], bool)
    }
    if dropped:
        body = {name: value for name, value in body.items() if name not in dropped}
    for name, value in body.items():
        if name == SERVICE_TIER and value not in PLAIN_TIERS:
            problem = f"{name} {str(value)[:MAX_NAME]!r} is not available here"
            raise _refusal(problem, name, 'send "default"')
        allowed = name in ALLOWED or name in more or name == SERVICE_TIER
        if name == STRUCTURED and isinstance(value, dict):
            allowed = allowed or value.keys() <= STRUCTURED_OPTIONS
        if not allowed and value is not None:
            name = name[:MAX_NAME]
            problem = f"{name!r} is not forwarded by this gateway"
            raise _refusal(problem, name, "ask the operator to allow it ([limits] fields)")
    return body


def _refusal(problem: str, name: str, alternative: str) -> ApiError:
    return ApiError(
        f"Unsupported parameter: {problem}.",
        code="unsupported_parameter",
        param=name,
        hint=f"leave it out, or {alternative}",
    )
