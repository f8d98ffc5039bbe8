"""What a client is told when it gets no answer: one error, in the shape of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from bottega.errors import (
    BottegaError,
    EndpointError,
    EndpointTimeoutError,
    ImageError,
    RateLimitedError,
    RejectedError,
    SettingError,
)
from bottega.gateway.ports import TierCapabilities
from bottega.openai_api.breaker import PausedError
from bottega.openai_api.errors import ApiError, RequestRejectedError
from bottega.openai_api.request import ChatRequest

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# The client's libraries would try again what was tried several times already.
FINAL = {"x-should-retry": "false"}


class MisconfiguredError(RejectedError):
    """The upstream rejects the gateway's key, quota, model name or address. The client gets a 502
    that names the `tier`, which the caller of the upstream sets; the message is for the operator.
    """

    def __init__(self, error: EndpointError) -> None:
        super().__init__(str(error), hint=error.hint, status=502)
        self.retry_after = error.retry_after
        self.tier = ""

    def __str__(self) -> str:
        message = super().__str__()
        return f"tiers.{self.tier}: {message}" if self.tier else message


def to_api_error(error: Exception) -> ApiError:
    """An error of ours as the client may see it; anything else is an accident, of which nothing
    is told but that it happened. What an upstream said of itself, and where it is, stands in the
    log alone."""
    match error:
        case ApiError():
            return error
        case PausedError():
            return _upstream(
                503, "upstream_paused", f"{MODEL} has failed too often", error.retry_after
            )
        case RateLimitedError():
            return _upstream(
                429, "rate_limit_exceeded", f"{MODEL} is asked too often", error.retry_after
            )
        case EndpointTimeoutError():
            return _upstream(504, "upstream_timeout", f"{MODEL} did not answer in time")
        case MisconfiguredError():
            who = f"the tier {error.tier!r} of this gateway" if error.tier else MODEL
            said = f"{who} is set up wrongly; the gateway's log tells the operator how"
            return _upstream(502, "upstream_misconfigured", said)
        case RequestRejectedError():
            return ApiError(
                error.detail or "the model refused this request",
                status=error.status or 400,
                type=error.kind or "invalid_request_error",
                code=error.code,
                param=error.param,
                headers=FINAL,
            )
        case RejectedError():
            return ApiError(str(error), status=error.status or 400, headers=FINAL)
        case EndpointError():
            status = 502 if error.retry_after is None else 503
            return _upstream(status, "upstream_failed", f"{MODEL} failed", error.retry_after)
        case ImageError():
            return ApiError(str(error), code="invalid_image", hint=error.hint)
        case SettingError():
            return ApiError(str(error), code="unsupported", hint=error.hint)
        case BottegaError() if error.retryable:
            return ApiError(BUSY, status=503, type="server_error", headers=FINAL)
    return ApiError(FAILED, status=500, type="server_error", headers=FINAL)


CLOSING = ApiError(
    "the gateway is shutting down",
    status=503,
    type="server_error",
    code="shutting_down",
    headers={"retry-after": "1", "connection": "close"},
    hint="try again: another one may answer",
)


def unknown_key(key: str) -> ApiError:
    said, hint = "this API key is not known here", "ask the operator for one"
    if not key:
        said, hint = "no API key came with this request", "send Authorization: Bearer KEY; " + hint
    make = " (`bottega keys add NAME`)"
    return ApiError(said, status=401, code="invalid_api_key", hint=hint + make)


BUSY = "the gateway is busy; try again later"
FAILED = "the gateway failed; its log tells why"
MODEL = "the model behind this gateway"


def _upstream(status: int, code: str, said: str, wait: float | None = None) -> ApiError:
    kind = "rate_limit_error" if status == 429 else "server_error"
    headers = FINAL if wait is None else {**FINAL, "retry-after": str(math.ceil(wait))}
    return ApiError(said, status=status, type=kind, code=code, headers=headers)


async def send_error(error: ApiError, send: Send) -> None:
    """Send the refusal as an ASGI response."""
    headers = {
        "content-type": "application/json",
        "content-length": str(len(error.body)),
        **error.headers,
    }
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": error.body})


def unsupported_request(
    request: ChatRequest, capabilities: Sequence[TierCapabilities], named: str = ""
) -> ApiError:
    """`named` is the tier that the client asked for: the only one that could have answered."""
    it = "it takes" if named else "they take"
    found = list(_reasons(request, capabilities))
    if not found:  # each property is supported by some tier
        found = [("all of this only apart", "send less at once")]
    said = ", ".join(reason for reason, _ in found)
    instead = " and ".join(dict.fromkeys(hint for _, hint in found))
    who = f"the tier {named!r} cannot" if named else "no tier can"
    return ApiError(
        f"{who} take this request: {it} {said}",
        code="unsupported_by_tier",
        hint=f"ask for the model 'bottega', or {instead}" if named else instead,
    )


def _reasons(
    request: ChatRequest, capabilities: Sequence[TierCapabilities]
) -> list[tuple[str, str]]:
    images, context = (
        _most([one.images for one in capabilities]),
        _most([one.context for one in capabilities]),
    )
    found = []
    if request.has_tools and not any(one.tools for one in capabilities):
        found.append(("no tools", "leave the tools out"))
    if request.has_audio and not any(one.audio for one in capabilities):
        found.append(("no audio", "leave the audio out"))
    if images == 0 and request.images:
        found.append(("no images", "leave the images out"))
    elif images is not None and len(request.images) > images:
        said = f"at most {images} images, and these are {len(request.images)}"
        found.append((said, "send fewer images"))
    if context is not None and request.prompt_tokens > context:
        said = f"at most {context:,} tokens, and these are about {request.prompt_tokens:,}"
        found.append((said, "send a shorter text"))
    return found


def _most(limits: Sequence[int | None]) -> int | None:
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None
