"""What a client is told when it gets no answer: one error, in the shape of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from bottega.errors import (
    BottegaError,
    EndpointError,
    EndpointTimeoutError,
    ImageError,
    RateLimitedError,
    RejectedError,
    SettingError,
)
from bottega.gateway.upstream_errors import MisconfiguredError, RefusedError

# The client's libraries would try again what was tried several times already.
FINAL = {"x-should-retry": "false"}


class Refusal(BottegaError):
    """`type`, `code` and `param` as openai-python shows them; `status` is the HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        said = f"{self} ({self.hint})" if self.hint else str(self)
        error = {"message": said, "type": self.type, "param": self.param, "code": self.code}
        # Half a character of the client's may stand in a message.
        error["message"] = said.encode(errors="replace").decode()
        return orjson.dumps({"error": error})


def refusal_of(error: Exception) -> Refusal:
    """An error of ours as the client may see it; anything else is an accident, of which nothing
    is told but that it happened."""
    match error:
        case Refusal():
            return error
        case RateLimitedError():
            wait = {} if error.retry_after is None else {"retry-after": f"{error.retry_after:.0f}"}
            return _upstream(error, 429, "rate_limit_exceeded", wait)
        case EndpointTimeoutError():
            return _upstream(error, 504, "upstream_timeout")
        case MisconfiguredError():
            return Refusal(
                "the model behind this gateway is set up wrongly; its log tells how",
                status=502,
                type="server_error",
                code="upstream_misconfigured",
                headers=FINAL,
            )
        case RefusedError():
            return Refusal(
                error.said or str(error),
                status=error.status or 400,
                type=error.kind or "invalid_request_error",
                code=error.code,
                param=error.param,
                headers=FINAL,
            )
        case RejectedError():
            return Refusal(str(error), status=error.status or 400, headers=FINAL)
        case EndpointError():
            wait = {} if error.retry_after is None else {"retry-after": f"{error.retry_after:.0f}"}
            return _upstream(error, 503 if wait else 502, "upstream_failed", wait)
        case ImageError():
            return Refusal(str(error), code="invalid_image", hint=error.hint)
        case SettingError():
            return Refusal(str(error), code="unsupported", hint=error.hint)
        case BottegaError():
            status = 503 if error.retryable else 500
            return Refusal(str(error), status=status, type="server_error", headers=FINAL)
    return Refusal(
        "the gateway failed; its log tells why", status=500, type="server_error", headers=FINAL
    )


def _upstream(
    error: EndpointError, status: int, code: str, headers: Mapping[str, str] | None = None
) -> Refusal:
    kind = "rate_limit_error" if status == 429 else "server_error"
    return Refusal(
        str(error), status=status, type=kind, code=code, headers={**FINAL, **(headers or {})}
    )
