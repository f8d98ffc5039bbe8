"""Streamed chat completions: server-sent events, and their chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

import orjson

from bottega.errors import EndpointError, GarbledError, ServerFailedError
from bottega.openai_api.endpoint import NO_HEADERS
from bottega.openai_api.errors import WRONG_PROTOCOL, JSONObject
from bottega.openai_api.response import (
    BOM,
    CONSTANTS,
    ChatCompletion,
    error_message,
    get,
    parse_completions,
    parse_reply,
    parse_usage,
    reported_failure,
    valid_json,
)
from bottega.types import Usage

CHARACTERS_PER_TOKEN = 3.5
# Sent complete, by some servers in every chunk; all other text comes in pieces.
COMPLETE_FIELDS = {"role", "type", "id", "name", "finish_reason"}
WHERE = "the model"
# Fields that all chunks of a stream share.
HEAD = ("id", "object", "created", "model")
# Up to this mean length in characters, each chunk of a stream counts as one token.
MAX_TOKEN_CHARACTERS = 8
# Returns the error for an HTTP status, the JSON of the error and the headers.
ToError = Callable[[int, JSONObject, Mapping[str, str]], EndpointError]


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
    if logprobs := choice.get("logprobs"):
        chunks[-1]["logprobs"] = logprobs
    # A complete reply has ended, even without a reason.
    return [*chunks, {"delta": {}, "finish_reason": choice.get("finish_reason") or "stop"}]


def from_events(payload: bytes, where: str, to_error: ToError, choices: int) -> ChatCompletion:
    """Return the complete reply that a body of events makes up. Raises like `StreamProgress`."""
    progress = StreamProgress(where, to_error, choices)
    return from_chunks([*progress.feed(payload), *progress.end()])


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
            _add(choices.setdefault(_choice_index(choice), {}), choice)
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
        and isinstance(choice.get("index"), int | None)
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
    if name == "content" and isinstance(old, str | list) and type(old) is not type(new):
        old, new = _parts(old), _parts(new)  # some servers begin with parts and go on with a string
    if isinstance(new, list):
        values = old if isinstance(old, list) else []
        for value in new:
            if name != "tool_calls":
                _add_value(values, value)
            elif isinstance(value, dict):
                add_call(values, value)
        return values
    if name in COMPLETE_FIELDS:
        return new or old
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        _add(old, new)
        return old
    return new


def _parts(content: object) -> object:
    """Return a text as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _add_value(values: list[object], new: object) -> None:
    """Append a value, or join it to the one of the same index: it comes in pieces."""
    if (index := _index(new)) is not None:
        for position in range(len(values) - 1, -1, -1):
            if _index(values[position]) == index:
                values[position] = _joined(values[position], new, "")
                return
    values.append(new)


def add_call(calls: list[dict[str, object]], piece: JSONObject) -> int:
    """Join a piece of a tool call to its call, or append it as a new one; return the call's
    position.

    Some servers omit the index or give the same to all parallel calls, others send another id with
    each piece. A name begins a call, unless the call with this index has the same id or name.
    """
    position = _call_position(calls, piece)
    if position == len(calls):
        calls.append({})
    _add(calls[position], piece)
    return position


def _call_position(calls: Sequence[JSONObject], piece: JSONObject) -> int:
    index, key = _index(piece), piece.get("id")
    able = [n for n, call in enumerate(calls) if index is None or _index(call) == index]
    same = [n for n in able if key and calls[n].get("id") == key]
    position = (same or able or [len(calls)])[-1]
    is_known = position < len(calls) and not _is_another_call(calls[position], piece)
    return position if is_known else len(calls)


def _is_another_call(call: JSONObject, piece: JSONObject) -> bool:
    function, before = piece.get("function"), get(call.get("function"), "name")
    name, key = get(function, "name"), piece.get("id")
    is_complete = isinstance(get(function, "arguments"), dict)
    if not name or not before:
        return False
    if is_complete or name != before or (_index(piece) is None and not key):
        return True
    return bool(key and call.get("id")) and call.get("id") != key


def _index(value: object) -> int | None:
    index = get(value, "index")
    return index if isinstance(index, int) else None


def _choice_index(choice: JSONObject) -> int:
    return _index(choice) or 0


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
DONE_EVENT = b"data: [DONE]\n\n"
# No chunk of an answer comes near; a line without an end would fill the memory.
MAX_EVENT = 8 << 20
LINE_OVERHEAD = 64
MAX_PIECE = 64 << 10  # of bytes that are read at once
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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


class StreamProgress:
    """Reader that turns the bytes of a streamed answer into its chunks, and knows which choices
    have ended, and whether `[DONE]` was read. Chunks are held until one has content: until then,
    another attempt or tier may answer. After all choices have ended, errors are ignored."""

    def __init__(self, where: str, to_error: ToError, choices: int) -> None:
        self._where, self._to_error, self._choices = where, to_error, choices
        self._events = EventReader(where)
        self._seen, self._ended = set[int](), set[int]()
        # First halves of surrogate pairs, by the text whose next piece has the second.
        self._halves: dict[tuple[object, ...], str] = {}
        self._held: list[bytes] = []
        self._last: JSONObject = {}
        self._has_begun = self.is_done = False

    @property
    def is_complete(self) -> bool:
        return len(self._ended) >= self._choices

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the chunks that these bytes complete, as valid JSON; other events, such as pings,
        have none. Raises the error that an event reports, `GarbledError` if it is no chunk."""
        for start in range(0, len(data), MAX_PIECE):
            try:
                events = self._events.feed(data[start : start + MAX_PIECE])
            except GarbledError:
                if not self.is_complete:
                    raise
                return
            yield from self._take(events)

    def end(self) -> Iterator[bytes]:
        """Yield the chunks that are missing after the last bytes. Raises `ServerFailedError` if the
        answer is incomplete or empty. A server that sends `[DONE]` after some content may have sent
        fewer choices than requested, or no finish reason: a chunk then says that the answer may be
        cut off, so that it is neither stored nor repeated."""
        with suppress(GarbledError):  # no empty line ended the last event: it may be incomplete
            yield from self._take(self._events.end())
        if not (self.is_complete or (self.is_done and self._has_begun)):
            raise cut_off(self._where)
        yield from self._held
        choices: list[dict[str, object]] = [
            {"index": index, "delta": {}, "finish_reason": "length"}
            for index in sorted(self._seen - self._ended)
        ]
        for choice in choices:
            self._end_halves(choice)
        if choices:
            head = {name: self._last[name] for name in HEAD if name in self._last}
            yield orjson.dumps({"object": "chat.completion.chunk", **head, "choices": choices})

    def _take(self, events: Sequence[bytes]) -> Iterator[bytes]:
        for event in events:
            self.is_done = self.is_done or event == DONE
            if self.is_done:
                return
            try:
                chunk = self._chunk(event)
            except EndpointError:
                if not self.is_complete:
                    raise
                continue
            if chunk is not None:
                self._held.append(chunk)
            if self._has_begun:
                held, self._held = self._held, []
                yield from held

    def _chunk(self, event: bytes) -> bytes | None:
        chunk, event = self._parsed(event)
        choices = chunk.get("choices")
        if choices is None and not chunk.get("error"):
            # A ping, or the usage alone, which clients expect beside an empty list.
            return orjson.dumps({**chunk, "choices": []}) if chunk.get("usage") else None
        if chunk.get("error") or not isinstance(choices, list):
            raise self._problem(chunk)
        self._last = chunk
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("error"):
                raise self._problem(chunk)
            self._seen.add(_choice_index(choice))
            if finish := choice.get("finish_reason"):
                if finish == "error":
                    raise self._problem(chunk)
                self._ended.add(_choice_index(choice))
            self._has_begun = self._has_begun or bool(finish) or _has_content(choice.get("delta"))
        return event

    def _parsed(self, event: bytes) -> tuple[JSONObject, bytes]:
        """Return the chunk and its JSON, with the first half of a surrogate pair moved to the chunk
        with the second."""
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError:
            chunk = None  # also for half a pair
        if isinstance(chunk, dict) and not self._halves:
            return chunk, event
        with suppress(ValueError, LookupError, TypeError, RecursionError):  # no chunk
            chunk = json.loads(event, parse_constant=CONSTANTS.get)
            for choice in chunk["choices"]:
                self._join_halves(choice)
            event = valid_json(chunk)
        return parse_reply(event, self._where)

    def _join_halves(self, choice: dict[str, object]) -> None:
        for key, values, name in _texts(choice):
            text = self._halves.pop(key, "") + cast(str, values[name])
            if "\ud800" <= text[-1:] <= "\udbff":
                text, self._halves[key] = text[:-1], text[-1]
            values[name] = text
        if choice.get("finish_reason"):
            self._end_halves(choice)

    def _end_halves(self, choice: dict[str, object]) -> None:
        """Add the replacement character to the last piece of a choice for each half of a pair."""
        delta = choice.get("delta")
        choice["delta"] = delta = delta if isinstance(delta, dict) else {}
        for key in [key for key in self._halves if key[0] == _choice_index(choice)]:
            del self._halves[key]
            _, name, *call = key
            function = {"arguments": REPLACEMENT}
            calls = [{"index": index, "function": function} for index in call]
            _add(delta, {cast(str, name): calls or REPLACEMENT})

    def _problem(self, chunk: JSONObject) -> EndpointError:
        if failure := reported_failure(chunk):
            return self._to_error(*failure, NO_HEADERS)
        return GarbledError(f"{self._where} sent an event without choices", hint=WRONG_PROTOCOL)


def _has_content(delta: object) -> bool:
    """Return whether a piece of an answer has more than its role: text, reasoning, a tool call."""
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


def _texts(choice: JSONObject) -> Iterator[tuple[tuple[object, ...], dict[str, object], str]]:
    """Yield the texts of a chunk's choice: what identifies them among chunks, the object, and its
    field."""
    delta, index = choice.get("delta"), _choice_index(choice)
    if not isinstance(delta, dict):
        return
    for name in delta:
        if isinstance(delta[name], str):
            yield (index, name), delta, name
    for call in delta.get("tool_calls") or ():
        function = get(call, "function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            yield (index, "tool_calls", _index(call)), function, "arguments"


def cut_off(where: str) -> ServerFailedError:
    return ServerFailedError(
        f"{where} cut the connection before the end of its reply",
        hint="try again; look at the server's log",
    )
