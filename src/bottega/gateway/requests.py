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
from bottega.gateway.accounting.row_types import Account
from bottega.gateway.errors import unknown_model
from bottega.gateway.ports import ANONYMOUS, Receive
from bottega.image import MAX_PIXELS, Image
from bottega.openai_api.endpoint import is_loopback, parse_address
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

PORT = re.compile(r":\d*\Z")


def has_port(host: str) -> bool:
    """Return whether a host ends in a port. An IPv6 address without brackets has none."""
    return _address(host) is None and PORT.search(host) is not None


def host_name(host: str) -> str:
    """Return the normalized name or IP address of a host, without its port."""
    name = PORT.sub("", host) if has_port(host) else host
    name = name.lower().removesuffix(".")
    return _address(name) or name


def check_host(host: str | None, allowed: Collection[str] = ()) -> None:
    """Raise `ApiError` for a host name that is neither loopback nor allowed.

    To a browser, a web page whose name resolves to 127.0.0.1 (DNS rebinding) has the same origin as
    the gateway: only the Host header distinguishes it from a local client.
    """
    if host is None:
        return
    if not _is_local(host, allowed):
        raise ApiError(
            f"the host name is not allowed, got {host_name(host)[:100]!r}",
            status=403,
            code="host_forbidden",
            hint="use localhost or add the name to gateway.allowed_hosts; for the API, run bottega"
            " keys add NAME and restart the gateway: with keys it accepts every name",
        )


def _is_local(host: str, allowed: Collection[str]) -> bool:
    """Return whether a host is `localhost`, a loopback address or one of `allowed`."""
    name = host_name(host)
    return is_loopback(name) or name in map(host_name, allowed)


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the key in the Authorization header or, as Anthropic's clients send it, in x-api-key;
    empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def check_origin(
    origin: str | None, allowed: Collection[str] = (), origins: Collection[str] = ()
) -> None:
    """Raise `ApiError` for a web page whose origin is not in `origins` and whose host is neither
    loopback nor allowed.

    Browsers send such requests and hide only the responses, so the requests would still cost money
    and fill the cache. Apps and extensions have other schemes than http and https.
    """
    if origin is None or origin in origins:
        return
    scheme, _, host = origin.lower().partition("://")
    if origin == "null" or (scheme in ("http", "https") and not _is_local(host, allowed)):
        raise ApiError(
            f"web pages of other hosts need an API key, got the origin {origin[:100]!r}",
            status=403,
            code="origin_forbidden",
            hint="add the origin to gateway.allowed_origins, or run bottega keys add NAME, restart"
            " the gateway, and send the key",
        )


def _address(host: str) -> str | None:
    """Return the normalized IP address, or None for a name."""
    address = parse_address(host.removeprefix("[").removesuffix("]"))
    # Python before 3.13 does not count ::ffff:127.0.0.1 as loopback.
    return None if address is None else str(getattr(address, "ipv4_mapped", None) or address)


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


PREFIX = "x-bottega-"
MODEL = "bottega"
MAX_SHOTS = 64
MAX_MODEL = 1000
SWITCHES = ("no-store", "no-retrieve", "no-replay")
FORMS = {
    "shots": f"a whole number from 0 to {MAX_SHOTS}",
    "master-rate": "a number from 0 to 1",
    "namespace": "a name",
}
EXAMPLE = "bottega:shots=2,no-store"


@dataclass(frozen=True)
class Overrides:
    """Options of one request; None and True keep the configured behaviour. `tier` replaces the
    router's choice."""

    tier: str | None = None
    shots: int | None = None
    master_rate: float | None = None
    namespace: str | None = None
    store: bool = True
    retrieve: bool = True
    replay: bool = True


def may_use(account: Account, namespace: str) -> bool:
    """Return whether the key may use the namespace: its own, one below it, or any for an admin and
    for clients without keys."""
    own = account.namespace
    is_open = account is ANONYMOUS or account.admin
    return is_open or namespace == own or bool(own and namespace.startswith(f"{own}/"))


def namespace_of(account: Account, overrides: Overrides) -> str:
    """Return the namespace of a request: that of its key, or one that the client names. Raises
    `ApiError`."""
    own, wanted = account.namespace, overrides.namespace
    if wanted is None:
        return own
    if may_use(account, wanted):
        return wanted
    raise ApiError(
        f"this key has no access to the namespace {wanted[:100]!r}",
        status=403,
        code="namespace_forbidden",
        hint=f"leave it out, or name one below {own!r}/" if own else "leave it out",
    )


def read_overrides(model: str, headers: Mapping[str, str], tiers: Mapping[str, str]) -> Overrides:
    """Return the overrides. `tiers` maps every model id that clients may use to its tier, "" for
    the router's choice. A header takes precedence over the model's suffix. Raises `ApiError`."""
    # A model id such as qwen2.5vl:7b may contain the separator itself.
    name, _, suffix = model.partition(":") if model not in tiers else (model, "", "")
    if name not in tiers or len(model) > MAX_MODEL:
        raise unknown_model(model, tiers)
    settings = [(word, "model") for word in filter(None, suffix.split(","))]
    for header, value in headers.items():
        word = header.removeprefix(PREFIX)  # "cache" takes switches; others are name and value
        words = value.split(",") if word == "cache" else [f"{word}={value}"]
        settings += [(word, header) for word in filter(None, words)]
    found: dict[str, Any] = {"tier": tiers[name] or None}
    for setting, param in settings:
        found |= _read(setting.strip(), param, tiers)
    return Overrides(**found)


def _read(setting: str, param: str, tiers: Mapping[str, str]) -> dict[str, object]:
    word, _, value = setting.partition("=")
    try:
        match word:
            case "shots" if 0 <= (shots := int(value)) <= MAX_SHOTS:
                return {"shots": shots}
            case "master-rate" if 0 <= (rate := float(value)) <= 1:
                return {"master_rate": rate}
            case "namespace" if value:
                return {"namespace": value}
            case "route" if tiers.get(f"{MODEL}/{value}"):
                return {"tier": value}
            case _ if word in SWITCHES and not value:
                return {word.removeprefix("no-"): False}
    except ValueError:
        pass
    raise _error(setting[:200], param, tiers)


def _error(setting: str, param: str, tiers: Mapping[str, str]) -> ApiError:
    word, _, value = setting.partition("=")
    names = [tier for tier in tiers.values() if tier]
    forms = {**FORMS, **({"route": _joined(names)} if names else {})}
    message, hint = f"{word} is invalid, got {value!r}", f"use {forms.get(word)}"
    if word in SWITCHES:
        hint = f"write {word} without a value"
    elif word not in forms:
        message, hint = (
            f"{setting!r} is not an override",
            f"use {_joined([*forms, *SWITCHES])}: {EXAMPLE}",
        )
    return ApiError(message, code="invalid_override", param=param, hint=hint)


def _joined(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


# Titles, tags and follow-ups that chat front ends request on their own.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
# Fields of transport and identity, which do not change the answer.
TRANSPORT_FIELDS = {
    "messages",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "stream",
    "stream_options",
    "user",
}
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
