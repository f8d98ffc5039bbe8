"""Streamed chat completions: server-sent events, and their chunks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import orjson

from bottega.errors import GarbledError, ServerFailedError
from bottega.openai_api.errors import WRONG_PROTOCOL, JSONObject
from bottega.openai_api.response import (
    ChatCompletion,
    error_message,
    get,
    parse_completions,
    parse_usage,
    reported_failure,
)
from bottega.types import Usage

CHARACTERS_PER_TOKEN = 3.5
# Sent complete, by some servers in every chunk; all other text comes in pieces.
COMPLETE_FIELDS = {"role", "type", "id", "name", "finish_reason"}
WHERE = "the model"
# Up to this mean length in characters, each chunk of a stream counts as one token.
MAX_TOKEN_CHARACTERS = 8


def to_chunks(payload: bytes, *, include_usage: bool) -> tuple[bytes, ...]:
    """Return the chunks of a complete reply: the role, the text, the finish reason, and if
    requested the usage (null before). Id and time stay the same."""
    reply = orjson.loads(payload)
    usage = reply.pop("usage", None)
    choices = reply.pop("choices")
    head = reply | {"object": "chat.completion.chunk"}
    tail = {"usage": None} if include_usage else {}
    chunks = [
        head | {"choices": [{"index": choice.get("index", 0), **delta}]} | tail
        for choice in choices
        for delta in _deltas(choice)
    ]
    if include_usage:
        chunks.append(head | {"choices": [], "usage": usage})
    return tuple(map(orjson.dumps, chunks))


def _deltas(choice: JSONObject) -> list[dict[str, object]]:
    message = dict(cast(JSONObject, choice["message"]))
    role, content = message.pop("role", "assistant"), message.pop("content", None)
    rest = {name: value for name, value in message.items() if value is not None}
    deltas: list[dict[str, object]] = [{"role": role, "content": ""}]
    if rest:  # reasoning, for one, comes before the answer
        deltas.append(rest)
    if content:
        deltas.append({"content": content})
    chunks: list[dict[str, object]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
    return [*chunks, {"delta": {}, "finish_reason": choice.get("finish_reason")}]


def from_events(payload: bytes) -> ChatCompletion:
    """Return the complete reply that a body of events makes up. Raises like `from_chunks`."""
    reader = EventReader(WHERE)
    return from_chunks(one for one in (*reader.feed(payload), *reader.end()) if one != DONE)


def from_chunks(chunks: Iterable[bytes]) -> ChatCompletion:
    """Return the complete reply that the chunks make up. Raises `ServerFailedError` for a stream
    that reports a failure or ends before each of its choices does."""
    head: dict[str, object] = {}
    choices: dict[int, dict[str, object]] = {}
    for payload in chunks:
        chunk = _parsed(payload)
        if failure := reported_failure(chunk):
            status, body = failure
            problem = f"{WHERE} failed during its reply: {error_message(body)}"
            raise ServerFailedError(problem, hint="try again", status=status)
        for choice in cast(list[dict[str, object]], chunk.pop("choices", None) or []):
            _add(choices.setdefault(cast(int, choice.get("index", 0)), {}), choice)
        head |= {name: value for name, value in chunk.items() if value is not None}
    if not choices or not all(choice.get("finish_reason") for choice in choices.values()):
        raise ServerFailedError(f"{WHERE}'s reply was cut off", hint="try again")
    complete = [_complete(choices[index]) for index in sorted(choices)]
    body = head | {"object": "chat.completion", "choices": complete}
    return ChatCompletion(
        orjson.dumps(body),
        str(head.get("model", "")),
        parse_completions(body, WHERE),
        parse_usage(body) if "usage" in head else None,
    )


def count_tokens(chunks: Iterable[bytes]) -> int:
    """Estimate the completion tokens of a stream that ended before its usage. Most servers send one
    chunk per token; larger pieces are counted by their characters."""
    lengths = [length for chunk in chunks if (length := _characters(chunk))]
    if sum(lengths) <= MAX_TOKEN_CHARACTERS * len(lengths):
        return len(lengths)
    return math.ceil(sum(lengths) / CHARACTERS_PER_TOKEN)


def reported_usage(chunks: Sequence[bytes]) -> Usage | None:
    """Return the usage that the last chunk of a stream reports, or None."""
    try:
        usage = parse_usage(_parsed(chunks[-1])) if chunks else Usage()
    except GarbledError:
        return None
    return usage if usage.prompt_tokens + usage.completion_tokens else None


def has_only_usage(chunk: bytes) -> bool:
    return b'"usage"' in chunk and not orjson.loads(chunk).get("choices")


def _characters(chunk: bytes) -> int:
    try:
        choices = cast(list[dict[str, object]], _parsed(chunk).get("choices") or [])
    except GarbledError:
        return 0
    total = 0
    for choice in choices:
        for name, value in cast(JSONObject, choice.get("delta") or {}).items():
            if isinstance(value, str):
                total += 0 if name in COMPLETE_FIELDS else len(value)
            elif name == "tool_calls" and value:
                total += len(orjson.dumps(value))
    return total


def _parsed(payload: bytes) -> dict[str, object]:
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise GarbledError(f"{WHERE} sent an event that is not JSON", hint="try again") from error
    choices = chunk.get("choices") if isinstance(chunk, dict) else ()
    is_chunk = isinstance(choices, list | None) and all(
        isinstance(choice, dict)
        and isinstance(choice.get("index", 0), int)
        and isinstance(choice.get("delta"), dict | None)
        for choice in choices or ()
    )
    if not is_chunk:
        raise GarbledError(
            f"{WHERE} sent an event that is not a completion chunk", hint="try again"
        )
    return cast(dict[str, object], chunk)


def _add(merged: dict[str, object], piece: Mapping[str, object]) -> None:
    for name, value in piece.items():
        if value is not None:
            merged[name] = _joined(merged.get(name), value, name)


def _joined(old: object, new: object, name: str) -> object:
    if isinstance(old, str) and isinstance(new, str) and name not in COMPLETE_FIELDS:
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return _joined_lists(old, new)
    if isinstance(old, dict) and isinstance(new, dict):
        merged = dict(old)
        _add(merged, new)
        return merged
    return new


def _joined_lists(old: list[object], new: list[object]) -> list[object]:
    """Join tool calls, which come in pieces, by their index; append everything else."""
    merged = list(old)
    positions = {_index(value): position for position, value in enumerate(old)}
    for value in new:
        position = None if (index := _index(value)) is None else positions.get(index)
        if position is None or _is_another_call(merged[position], value):
            if index is not None:
                positions[index] = len(merged)
            merged.append(value)
        else:
            merged[position] = _joined(merged[position], value, "")
    return merged


def _is_another_call(old: object, new: object) -> bool:
    """Some servers give the same index to all parallel calls, but each its id."""
    before, after = get(old, "id"), get(new, "id")
    return bool(before and after) and before != after


def _index(value: object) -> int | None:
    index = value.get("index") if isinstance(value, dict) else None
    return index if isinstance(index, int) else None


def _complete(choice: JSONObject) -> dict[str, object]:
    message = dict(cast(JSONObject, choice.get("delta") or {}))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in calls
            if isinstance(call, dict)
        ]
    empty = {"role": "assistant", "content": None if calls else ""}
    rest = {name: value for name, value in choice.items() if name != "delta"}
    return {"index": 0} | rest | {"message": empty | message}


DONE = b"[DONE]"
# The halves of a surrogate pair that two pieces of a text share: at its end, at its beginning.
HIGH_HALF = re.compile(rb'(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?=")')
LOW_HALF = re.compile(rb'(?<=")\\u[dD][c-fC-F][0-9a-fA-F]{2}')
DONE_EVENT = b"data: [DONE]\n\n"
# No chunk of an answer comes near; a line without an end would fill the memory.
MAX_EVENT = 8 << 20
LINE_OVERHEAD = 64
BOM = b"\xef\xbb\xbf"


def to_event(payload: bytes) -> bytes:
    """Return the event of a payload, which must be JSON in one line."""
    return b"data: " + payload + b"\n\n"


class EventReader:
    """Reader that turns bytes, split anywhere, into the data of each event.

    Lines end with LF, CRLF or CR. Comments, ids, names and events without data are dropped. The
    lines of one event are joined by a space, which is equivalent to a line break in JSON, so such
    data can be written as one line again.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._data: list[bytes] = []
        self._part_bytes = 0
        self._data_bytes = 0  # with the overhead of each line, even an empty one
        self._after_return = False
        self._has_begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that this chunk completes. Raises `GarbledError`."""
        if self._after_return:  # the second half of a CRLF
            chunk, self._after_return = chunk.removeprefix(b"\n"), False
        if not chunk:
            return []
        self._part_bytes += len(chunk)
        if self._part_bytes + self._data_bytes > MAX_EVENT:
            error = GarbledError(
                f"{self._where} sent an event of more than {MAX_EVENT >> 20} MB",
                hint=WRONG_PROTOCOL,
            )
            error.retryable = False  # the next attempt would read it again
            raise error
        self._parts.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        return self._lines(b"".join(self._parts))

    def end(self) -> list[bytes]:
        """Return the data of the last event if the stream ends without an empty line."""
        return self._lines(b"".join(self._parts) + b"\n\n")

    def _lines(self, text: bytes) -> list[bytes]:
        if not self._has_begun:
            text, self._has_begun = text.removeprefix(BOM), True
        self._after_return = text.endswith(b"\r")
        lines = text.splitlines()  # of bytes: splits at LF, CRLF and CR only, unlike that of str
        rest = b"" if text.endswith((b"\n", b"\r")) else lines.pop()
        self._parts = [rest] if rest else []
        events = [data for line in lines if (data := self._line(line)) is not None]
        self._part_bytes = len(rest)
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._data_bytes = self._data, [], 0
            return b" ".join(data) if any(data) else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + LINE_OVERHEAD
        return None
