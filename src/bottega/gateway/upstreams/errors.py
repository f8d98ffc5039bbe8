"""What an upstream's refusal is to the gateway: the client's affair or the operator's."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from bottega.errors import EndpointError, RejectedError
from bottega.generation.connection import Endpoint
from bottega.generation.failing import NO_HEADERS, failed, shown
from bottega.generation.wire import JSONObject, said_in

# Key, quota, model name and address are the operator's; the client can mend none of them.
OPERATORS = (401, 402, 403, 404, 405, 407, 429)


class RefusedError(RejectedError):
    """The upstream refuses what the client asked. `said` is its own message without secrets;
    `kind`, `code` and `param` are its too, None where it named none."""

    def __init__(self, error: EndpointError, said: str, details: Mapping[str, str]) -> None:
        super().__init__(str(error), hint=error.hint, status=error.status)
        self.retry_after = error.retry_after
        self.said = said
        self.kind = details.get("type")
        self.code = details.get("code")
        self.param = details.get("param")


class MisconfiguredError(RejectedError):
    """The upstream refuses the gateway's key, quota, model name or address. The client gets a 502
    that names the `tier`, which whoever asked it fills in; the message is for the operator."""

    def __init__(self, error: EndpointError) -> None:
        super().__init__(str(error), hint=error.hint, status=502)
        self.retry_after = error.retry_after
        self.tier = ""

    def __str__(self) -> str:
        said = super().__str__()
        return f"tiers.{self.tier}: {said}" if self.tier else said


def upstream_error(
    endpoint: Endpoint,
    model: str,
    status: int,
    body: JSONObject,
    headers: Mapping[str, str] = NO_HEADERS,
) -> EndpointError:
    """`body` is the error's JSON, empty if there was none."""
    said = said_in(body)
    error = failed(endpoint, model, status, said, headers)
    if not isinstance(error, RejectedError):
        return error
    if status in OPERATORS or 300 <= status < 400:
        return MisconfiguredError(error)
    found = body.get("error")
    words = found.items() if isinstance(found, dict) else ()
    details = {name: shown(endpoint, word) for name, word in words if isinstance(word, str)}
    return RefusedError(error, shown(endpoint, said), details)


def error_body(payload: bytes) -> JSONObject:
    """The JSON of an error, empty if it is none: proxies like to send web pages."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def reported_body(body: JSONObject, said: str) -> JSONObject:
    """The error of a reply whose status is 200, be it of the whole or of one choice."""
    return body if body.get("error") else {"error": {"message": said}}
