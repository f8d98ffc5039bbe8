"""What the handlers of the administration API share: reading requests, answering, refusing."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response

from bottega.errors import (
    BottegaError,
    EmbeddingError,
    ImageError,
    LoadError,
    NotFoundError,
    SettingError,
    StoreBusyError,
    StoreFullError,
)
from bottega.gateway.refusals import Refusal

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# The first that fits; anything else of ours is the server's own trouble.
STATUS: tuple[tuple[type[BottegaError], int], ...] = (
    (NotFoundError, 404),
    (StoreBusyError, 503),
    (StoreFullError, 507),
    (SettingError, 400),
    (LoadError, 400),
    (ImageError, 400),
    (EmbeddingError, 400),
)


def answered(document: object, status: int = 200) -> Response:
    body = orjson.dumps(document)
    return Response(body, status, {**HEADERS, "content-type": "application/json"})


def refusal(error: BottegaError) -> Refusal:
    if isinstance(error, Refusal):
        return error
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {"retry-after": "1"} if error.retryable else {}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Refusal(str(error), status=status, type=kind, headers=headers, hint=error.hint)


def number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise Refusal(
            f"{name} is {text[:40]!a}", param=name, hint=f"give a whole number from 0 to {most}"
        )
    return int(text)


async def sent(request: Request, most: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        check_length(len(body), most)
    return bytes(body)


def check_length(length: int, most: int) -> None:
    if length > most:
        raise Refusal(
            f"the body is longer than {most:,} bytes", status=413, hint="send it in several parts"
        )


async def sent_object(
    request: Request, fields: Mapping[str, tuple[type, ...]], most: int
) -> dict[str, object]:
    """A JSON object of these fields and no others; null is as good as none."""
    try:
        row = orjson.loads(await sent(request, most))
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error.msg}", hint="send an object") from error
    if not isinstance(row, dict):
        raise Refusal("the body is not an object", hint=f"its fields: {', '.join(fields)}")
    for name, value in row.items():
        if name not in fields:
            raise Refusal(f"there is no field {name[:40]!a}", hint=f"fields: {', '.join(fields)}")
        # To Python, true is a number, too.
        if value is not None and type(value) not in fields[name]:
            raise Refusal(f"{name} is of the wrong type", param=name, hint="see docs/gateway.md")
    return {name: value for name, value in row.items() if value is not None}
