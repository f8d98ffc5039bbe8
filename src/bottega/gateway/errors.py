"""Errors that clients receive, in the format of the OpenAI API."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bottega._util.progress import plural
from bottega.errors import (
    BottegaError,
    EmbeddingError,
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    ImageError,
    LoadError,
    NotFoundError,
    PromptRejectedError,
    PromptTooLongError,
    RateLimitedError,
    RejectedError,
    SettingError,
    StoreBusyError,
    StoreFullError,
    StoreUnavailableError,
    UnreachableError,
)
from bottega.gateway.ports import RequestRecord, TierCapabilities
from bottega.openai_api.client import PausedError
from bottega.openai_api.errors import ApiError, RequestRejectedError
from bottega.openai_api.request import ChatRequest
from bottega.openai_api.transport import PLAIN_HINT

if TYPE_CHECKING:
    from starlette.responses import Response

log = logging.getLogger(__name__)
# The gateway has retried already; without this header, the client's library would too.
FINAL = {"x-should-retry": "false"}
# HTTP status by the first matching class; other errors are status 500.
STATUS: tuple[tuple[type[BottegaError], int], ...] = (
    (NotFoundError, 404),
    (StoreBusyError, 503),
    (StoreUnavailableError, 503),
    (StoreFullError, 507),
    (SettingError, 400),
    (LoadError, 400),
    (ImageError, 400),
    (EmbeddingError, 400),
)
CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CLOSING = ApiError(
    "the gateway is shutting down",
    status=503,
    code="shutting_down",
    headers={"retry-after": "1", "connection": "close"},
    hint="try again: another gateway may answer",
)
MODEL = "the model of this gateway"


class MisconfiguredError(RejectedError):
    """The upstream rejects the gateway's key, quota, model name or address. The client gets a 502
    that names the `tier`, which the caller of the upstream sets; message and `hint` are for the
    operator."""

    def __init__(self, error: EndpointError, hint: str) -> None:
        super().__init__(str(error), hint=hint, status=502)
        self.retry_after = error.retry_after
        self.detail, self.fields = error.detail, error.fields
        self.tier = ""

    def __str__(self) -> str:
        message = super().__str__()
        return f"tiers.{self.tier}: {message}" if self.tier else message


def tier_fix(error: BottegaError, key_variable: str | None, model: str) -> tuple[str, str]:
    """Return the setting of a tier that an error of its upstream concerns, "" if unknown, and the
    hint in terms of the configuration."""
    status = getattr(error, "status", None) or 0
    if isinstance(error, UnreachableError | EndpointTimeoutError):
        is_plain = error.hint == PLAIN_HINT
        return "base_url", error.hint if is_plain else "start the server, or correct base_url"
    if isinstance(error, GarbledError):
        return "base_url", "check that base_url is the API's address: it usually ends in /v1"
    if status in (401, 403):
        variable = key_variable or "NAME"
        first = "" if key_variable else 'set api_key_env = "NAME" and '
        return "api_key_env", f"{first}export {variable}=... with a key of this server"
    if status in (404, 405):
        return "model", f"correct model (now {model!r}) or base_url, which usually ends in /v1"
    if 300 <= status < 400:
        return "base_url", "set base_url to the address that it redirects to"
    return "", "set HTTPS_PROXY to a proxy that needs no login" if status == 407 else error.hint


def status_of(error: BottegaError) -> int:
    """Return the HTTP status of an error for an administrator."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def to_api_error(error: Exception) -> ApiError:
    """Return an exception as an error for the client. Details of unexpected exceptions, and the
    address and messages of upstreams, are for the log only."""
    match error:
        case ApiError():
            return error
        case PausedError():
            return _failure(
                503, "upstream_paused", f"{MODEL} has failed too often", error.retry_after
            )
        case RateLimitedError():
            return _failure(
                429, "rate_limit_exceeded", f"{MODEL} gets too many requests", error.retry_after
            )
        case EndpointTimeoutError():
            message = f"{MODEL} did not answer in time"
            return _failure(504, "upstream_timeout", message, error.retry_after)
        case MisconfiguredError():
            tier = f"the tier {error.tier!r} of this gateway" if error.tier else MODEL
            message = f"{tier} is misconfigured; see the gateway's log"
            return _failure(502, "upstream_misconfigured", message)
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
            status = error.status or 400
            return ApiError(str(error), status=status, type="invalid_request_error", headers=FINAL)
        case EndpointError():
            status = 502 if error.retry_after is None else 503
            return _failure(status, "upstream_failed", f"{MODEL} failed", error.retry_after)
        case PromptTooLongError():
            return ApiError(str(error), code="context_length_exceeded", hint=error.hint)
        case PromptRejectedError():
            return ApiError(str(error), code="unsupported", hint=error.hint)
        case ImageError():
            return ApiError(str(error), code="invalid_image", hint=error.hint)
        case SettingError():
            return ApiError(str(error), code="unsupported", hint=error.hint)
        case BottegaError() if error.retryable:
            return _failure(503, None, "the gateway is busy; try again later")
    return _failure(500, None, "the gateway failed; see its log")


def code_of(error: Exception, code: object) -> str:
    """Return the code of an error, or the name of its class if the code is missing or free text,
    which an upstream may have sent."""
    return code if isinstance(code, str) and CODE.fullmatch(code) else type(error).__name__


def reason_of(error: Exception) -> str:
    """Return a short description of a failure, without text from clients or upstreams."""
    return code_of(error, to_api_error(error).code).replace("_", " ")


def note_failure(record: RequestRecord, error: Exception, stream_of: str = "") -> ApiError:
    """Record why a request failed, and log the reason, which the client may not get. `stream_of` is
    the tier whose stream failed. Return the error for the client."""
    api_error = to_api_error(error)
    record.state, record.status = "failed", api_error.status
    record.reason = code_of(error, api_error.code)
    if not isinstance(error, BottegaError):
        log.error("request %s failed", record.request_id, exc_info=error)
    elif not isinstance(error, ApiError):
        when = " during its stream" if record.streamed else ""
        when += f" from {stream_of}" if stream_of else ""
        log.warning("request %s failed%s: %s", record.request_id, when, error)
    return api_error


def unknown_key(key: str) -> ApiError:
    """Return the error for a key that does not exist, or "" for a request without a key."""
    message, hint = "the API key is unknown", "ask the operator for a key"
    if not key:
        message, hint = "the request has no API key", "send Authorization: Bearer KEY; " + hint
    command = " (`bottega keys add NAME`)"
    return ApiError(message, status=401, code="invalid_api_key", hint=hint + command)


def unknown_model(name: str, models: Iterable[str]) -> ApiError:
    return ApiError(
        f"the model {name[:200]!r} does not exist",
        status=404,
        code="model_not_found",
        param="model",
        hint=f"use one of {', '.join(models)}",
    )


def _failure(status: int, code: str | None, message: str, wait: float | None = None) -> ApiError:
    headers = FINAL if wait is None else {**FINAL, "retry-after": str(math.ceil(wait))}
    return ApiError(message, status=status, code=code, headers=headers)


def error_response(error: ApiError, body: bytes | None = None, **headers: str) -> Response:
    """Return the error as a response, which is also an ASGI application. `body` is its JSON, by
    default that of the OpenAI API."""
    from starlette.responses import Response  # needs the extra [serve], this module does not

    return Response(body or error.body, error.status, headers | error.headers, "application/json")


def unsupported_request(
    request: ChatRequest, capabilities: Sequence[TierCapabilities], named: str = ""
) -> ApiError:
    """Return the error for a request that no tier supports. `named` is the tier that the client
    requested, if any."""
    found = list(_reasons(request, capabilities))
    if not found:  # each property is supported by some tier, but no tier supports all
        found = [("all of this only in separate requests", "send less at once")]
    reasons = ", ".join(reason for reason, _ in found)
    hints = " and ".join(dict.fromkeys(hint for _, hint in found))
    problem = "no tier supports this request: they support"
    if named:
        problem = f"the tier {named!r} does not support this request: it supports"
    return ApiError(
        f"{problem} {reasons}",
        code="unsupported_by_tier",
        hint=f"use the model 'bottega', or {hints}" if named else hints,
    )


def _reasons(
    request: ChatRequest, capabilities: Sequence[TierCapabilities]
) -> list[tuple[str, str]]:
    images = _most([one.images for one in capabilities])
    context = _most([one.context for one in capabilities])
    found = []
    if request.has_tools and not any(one.tools for one in capabilities):
        found.append(("no tools", "remove the tools"))
    if request.has_audio and not any(one.audio for one in capabilities):
        found.append(("no audio", "remove the audio"))
    if request.keeps_image_urls and not any(one.image_urls for one in capabilities):
        found.append(("no image URLs", "send the images as data URLs"))
    if images == 0 and request.images:
        found.append(("no images", "remove the images"))
    elif images is not None and len(request.images) > images:
        reason = f"at most {plural(images, 'image')}, got {len(request.images)}"
        found.append((reason, "send fewer images"))
    if context is not None and (total := request.total_tokens) > context:
        reason = f"at most {context:,} tokens, got about {total:,} for the prompt and max_tokens"
        found.append((reason, "send a shorter text or a lower max_tokens"))
    return found


def _most(limits: Sequence[int | None]) -> int | None:
    """Return the highest limit, None if one of the tiers has no limit."""
    numbers = [limit for limit in limits if limit is not None]
    return max(numbers) if len(numbers) == len(limits) else None
