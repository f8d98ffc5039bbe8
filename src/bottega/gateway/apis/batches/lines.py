"""Lines of a batch's input file, and of its output and error files."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bottega._util.durable_files import os_errors
from bottega._util.progress import plural
from bottega.gateway.apis.batches.batch_records import LineError
from bottega.gateway.apis.translation import encode_body

MAX_ERRORS = 100
MAX_CUSTOM_ID = 512
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchLine:
    """Request in an input file. `number` counts from 1; `start` and `length` are in bytes."""

    number: int
    start: int
    length: int
    custom_id: str


def read_lines(
    path: Path, endpoint: str, *, max_requests: int, max_bytes: int
) -> tuple[list[BatchLine], list[LineError]]:
    """Return the requests of an input file, and up to `MAX_ERRORS` errors in it. A line may have
    `max_bytes` bytes. Blocks. Raises `StoreError`."""
    lines: list[BatchLine] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, start, raw in _raw_lines(path, max_bytes):
        if len(errors) >= MAX_ERRORS:
            break
        if not raw.strip():
            continue
        if len(lines) >= max_requests:
            message = f"the file has more than {plural(max_requests, 'request', ',')}; split it"
            return lines, [LineError("too_many_requests", message, number)]
        found = _check_line(raw, number, endpoint, max_bytes, seen)
        if isinstance(found, LineError):
            errors.append(found)
        else:
            seen.add(found)
            lines.append(BatchLine(number, start, len(raw), found))
    if not (lines or errors):
        errors.append(LineError("empty_file", "the file has no requests"))
    return lines, errors


def read_body(path: Path, line: BatchLine) -> bytes:
    """Return the body of a request as JSON. Blocks. Raises `StoreError`, and `ApiError` for JSON
    that is nested too deeply."""
    with os_errors(path), path.open("rb") as file:
        file.seek(line.start)
        body = orjson.loads(file.read(line.length))["body"]
    return encode_body(body)


def reply_line(line: BatchLine, request_id: str, status: int, payload: bytes) -> bytes:
    """Return the line of the output or error file for a request that got a reply."""
    if b"\n" in payload or b"\r" in payload:  # some servers indent their JSON
        payload = orjson.dumps(orjson.loads(payload))
    reply = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(payload)}
    return _output(line, reply, None)


def error_line(line: BatchLine, code: str, message: str) -> bytes:
    """Return the line of the error file for a request that was not sent."""
    return _output(line, None, {"code": code, "message": message})


def _output(line: BatchLine, response: object, error: object) -> bytes:
    id = f"batch_req_{secrets.token_hex(16)}"
    fields = {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(fields)


def _raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, position and bytes of each line. The rest of a line that is too long is
    skipped."""
    with os_errors(path), path.open("rb") as file:
        number, start = 0, 0
        while raw := file.readline(max_bytes + 2):
            number += 1
            yield number, start, raw
            piece = raw
            while not piece.endswith(b"\n") and (piece := file.readline(max_bytes)):
                pass
            start = file.tell()


def _check_line(
    raw: bytes, number: int, endpoint: str, max_bytes: int, seen: set[str]
) -> str | LineError:
    """Return the custom id of a valid line, or its error."""
    if len(raw.rstrip(b"\r\n")) > max_bytes:
        return LineError("line_too_long", f"the line has more than {max_bytes:,} bytes", number)
    try:
        given: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return LineError("invalid_json_line", f"the line is not JSON: {error.msg}", number)
    if not isinstance(given, Mapping):
        return LineError("invalid_json_line", "the line is not a JSON object", number)
    for name in FIELDS:
        if name not in given:
            return LineError("missing_required_parameter", f"'{name}' is missing", number, name)
    id, body = given["custom_id"], given["body"]
    problem = ("invalid_value", "", "")
    if not isinstance(id, str) or not 0 < len(id) <= MAX_CUSTOM_ID:
        expected = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID} characters"
        problem = ("invalid_value", expected, "custom_id")
    elif id in seen:
        problem = ("duplicate_custom_id", f"the custom_id {id[:100]!r} occurs twice", "custom_id")
    elif given["method"] != "POST":
        problem = ("invalid_method", "'method' must be POST", "method")
    elif given["url"] != endpoint:
        problem = (
            "mismatched_endpoint",
            f"'url' must be {endpoint}, the endpoint of the batch",
            "url",
        )
    elif not isinstance(body, Mapping):
        problem = ("invalid_value", "'body' must be an object", "body")
    elif body.get("stream"):
        problem = ("unsupported_parameter", "'stream' is not supported in batches", "body.stream")
    code, message, param = problem
    return LineError(code, message, number, param) if message else id
