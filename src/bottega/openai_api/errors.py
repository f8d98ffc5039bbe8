"""Errors of the OpenAI API: those that an endpoint reports, and those that the gateway sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import orjson

from bottega.errors import (
    BottegaError,
    EndpointError,
    EndpointTimeoutError,
    RateLimitedError,
    RejectedError,
    ServerFailedError,
)

MAX_NAME = 200
JSON_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a decimal number",
    bool: "a boolean",
    dict: "an object",
    list: "an array",
    type(None): "null",
}

JSONObject = Mapping[str, object]
WRONG_PROTOCOL = "check that this server supports the OpenAI chat-completions protocol"
# By status, if not given. 501 is a request for something that this gateway does not offer.
TYPES = {
    403: "permission_error",
    429: "rate_limit_error",
    **dict.fromkeys((500, 502, 503, 504, 507), "server_error"),
}
# Codes and types of an account without credit. Messages are ambiguous: those of rate limits mention
# quota, too.
USED_UP = {
    "insufficient_quota",
    "insufficient_balance",
    "billing_hard_limit_reached",
    "billing_not_active",
    "exceeded_current_quota_error",
}
SHORT_WAIT = 60.0  # a used-up account does not recover within these seconds


class RequestRejectedError(RejectedError):
    """The endpoint rejects the request. `kind`, `code` and `param` are the fields `type`, `code`
    and `param` of its error, None if absent."""

    def __init__(self, error: EndpointError, detail: str, fields: Mapping[str, str]) -> None:
        super().__init__(str(error), hint=error.hint, status=error.status)
        self.detail, self.fields = detail, fields
        self.kind = fields.get("type")
        self.code = fields.get("code")
        self.param = fields.get("param")


class ApiError(BottegaError):
    """Error that a client of the gateway gets; `type`, `code` and `param` as openai-python shows
    them, `status` is the HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.type = type or TYPES.get(status, "invalid_request_error")
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        message = f"{self} ({self.hint})" if self.hint else str(self)
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        # A message may quote half of a surrogate pair from the client.
        error["message"] = message.encode(errors="replace").decode()
        return orjson.dumps({"error": error})


def status_error(
    status: int, message: str, where: str, model: str, fields: JSONObject, wait: float | None
) -> EndpointError:
    """Return the error for an HTTP status; `message` is the server's own, `fields` are the fields
    of its error, and `wait` the seconds after which it accepts another request, if it says so."""
    text = f"{where} answered {status}" + (f": {message}" if message else "")
    is_used_up = not USED_UP.isdisjoint((fields.get("code"), fields.get("type")))
    recovers = wait is not None and wait <= SHORT_WAIT
    if status == 429 and (recovers or not is_used_up):
        return RateLimitedError(text, status=status, hint="lower `concurrency`, or try again later")
    if status == 408:
        return EndpointTimeoutError(text, status=status, hint="try again, or raise `timeout`")
    if status == 409 or status >= 500:
        return ServerFailedError(
            text, status=status, hint="try again later; look at the server's log"
        )
    hints = {
        401: "set OPENAI_API_KEY (or api_key=) to a key that this endpoint accepts",
        403: "the key may not use this model: check OPENAI_API_KEY and the account's rights",
        404: f"check that the server has the model {model!r} and that the base URL ends in /v1",
        413: "send fewer demonstrations or smaller images",
        **dict.fromkeys((402, 429), "the account's quota is used up: check its billing"),
    }
    other = (
        "change the request; leave out a field that the server rejects: extra_body={'field': None}"
        ' in Python, drop_fields = ["field"] of a tier'
    )
    if 300 <= status < 400:
        other = "the base URL redirects: set it to the address that it redirects to"
    return RejectedError(text, status=status, hint=hints.get(status, other))


def wrong_type(param: str, expected: str, value: object) -> NoReturn:
    named = f"'{param}'" if param else "the request's body"
    got = JSON_NAMES.get(type(value), "something else")
    raise invalid(
        f"Invalid type for {named}: expected {expected}, but got {got}.",
        param or None,
        "invalid_type",
    )


def above_limit(param: str, problem: str, code: str = "limit_exceeded") -> NoReturn:
    param = param[:MAX_NAME]  # a client may send names of any length
    raise ApiError(
        f"Invalid '{param}': {problem}.",
        status=400,
        code=code,
        param=param,
        hint="send less at once, or ask the operator for a higher limit",
    )


def image_error(message: str, param: str, hint: str) -> ApiError:
    return ApiError(message, status=400, code="invalid_image", param=param, hint=hint)


def invalid(message: str, param: str | None, code: str) -> ApiError:
    return ApiError(
        message,
        status=400,
        code=code,
        param=param,
        hint="see the chat-completions reference for the fields of a request",
    )
