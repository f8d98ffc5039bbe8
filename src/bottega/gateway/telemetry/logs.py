"""Operator's log: one JSON object per request and per event.

The log never contains prompts, replies, image bytes, keys or query strings. An exception is logged
with its message only if it concerns the operator's configuration or the length of a prompt, else
with its type and traceback positions: its message may quote a client.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, NamedTuple, TextIO

import orjson

from bottega._util.batch_writer import BatchWriter
from bottega.errors import (
    BottegaError,
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    MissingDependencyError,
    ModelLoadError,
    PromptTooLongError,
    ServerFailedError,
    SettingError,
    StoreError,
    UnreachableError,
)
from bottega.gateway.accounting.ledger_schema import Entry
from bottega.gateway.errors import MisconfiguredError
from bottega.openai_api.client import PausedError
from bottega.openai_api.endpoint import redactor
from bottega.recipes.rcts import SearchError

Scrub = Callable[[str], str]

# Removed before the other patterns run: base64 is quick to find, and slow to search by megabytes.
BASE64 = re.compile(r"data:[\w.+-]+/[\w.+-]+[^\s,\"']*,[^\s\"'<>]*|[A-Za-z0-9+/=_-]{100,}")
QUERY = re.compile(r"\?[^\s\"'<>=]*=[^\s\"'<>]*")
HEADER = re.compile(
    r"((?:authorization|cookie|api[-_]?key|token|secret|password)[\"']?\s*[:=]\s*)"
    # Hints contain `export NAME_API_KEY=...` and `(or api_key=)`.
    r"(?:(?:basic|bearer)\s+)?(?=[^\s,;]*\w)[^\s,;]+",
    re.IGNORECASE,
)
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MAX_SEARCHED = 64 * 1024
MAX_TEXT = 2_000
CACHED_TEXTS = 1_024  # model names and namespaces repeat
SHORT_TEXT = 200
ONE_WORD = 40
REQUEST = "req_"  # prefix of request ids, which are unique and would only fill the cache
log = logging.getLogger(__name__)
Style = Literal["json", "text"]
STYLES: tuple[Style, ...] = ("json", "text")
MAX_WAITING = 10_000  # lines, while the stream is blocked
WRITE_BATCH = 500
FLUSH_SECONDS = 0.25
FRAMES = 12
# Their messages are about the operator's files, settings, packages and hosts. Those of a server are
# left out: it may quote the request.
SETUP_ERRORS = (
    SettingError,
    StoreError,
    MissingDependencyError,
    ModelLoadError,
    UnreachableError,
    EndpointTimeoutError,
    GarbledError,
    MisconfiguredError,
)
ERROR_FIELDS = ("code", "type", "param")
ERROR_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
_writers: list[Writer] = []


def scrubber(secrets: Iterable[str] = ()) -> Scrub:
    """Return a function that removes these secrets, text that looks like a secret, query strings
    and base64 data."""
    values = frozenset(secret for secret in secrets if secret)
    redact = redactor(values)

    def scrub(text: str) -> str:
        text = BASE64.sub("[bytes]", text)
        if len(text) > MAX_SEARCHED:
            return "[too long to be searched for secrets]"
        # Truncate last: a truncated secret would not be recognized.
        return HEADER.sub(r"\1[redacted]", redact(QUERY.sub("?[redacted]", text)))[:MAX_TEXT]

    scrub_cached = lru_cache(CACHED_TEXTS)(scrub)

    def scrub_fast(text: str) -> str:
        if len(text) <= ONE_WORD and text not in values and text.removeprefix(REQUEST).isalnum():
            return text  # every secret pattern contains punctuation
        return scrub_cached(text) if len(text) < SHORT_TEXT else scrub(text)

    return scrub_fast


def printable(text: str) -> str:
    """Return the text without line breaks and terminal control characters."""
    return CONTROLS.sub(" ", text)


class WarningLogger:
    """Logger of problems that do not fail a request. `count` is called each time. Each kind is
    logged once, without its message: a client can trigger it any number of times, and the message
    may quote the client."""

    def __init__(self, count: Callable[[str], None] = lambda problem: None) -> None:
        self.count = count
        self._logged: set[tuple[str, str]] = set()

    def __call__(self, problem: str, error: BottegaError | None = None) -> None:
        self.count(problem)
        kind = "" if error is None else type(error).__name__
        if isinstance(error, SearchError):
            kind = error.reason
        if (problem, kind) not in self._logged:
            self._logged.add((problem, kind))
            log.warning(
                "%s: %s (logged once; bottega_warnings_total counts)", problem, kind or "see above"
            )


def log_request(
    entry: Entry,
    reason: str = "",
    fallback: str = "",
    client_id: str = "",
    trace_id: str = "",
    route_reason: str = "",
) -> None:
    """Log one request with the `reason` why it failed or passed through, the tiers that failed
    before the `fallback`, the client's own id, the id of its OpenTelemetry trace, and the reasons
    for its tier. Bypasses the logging module, which takes longer than the rest of a replay."""
    line = _RequestLine(entry, reason, time.time(), fallback, client_id, trace_id, route_reason)
    for writer in _writers:
        writer.put(line)


def error_text(error: BaseException) -> str:
    """Return the part of an error that may be logged."""
    name = type(error).__name__
    if isinstance(error, PausedError) and error.last is not None:
        return f"{name} after {error_text(error.last)}"
    # The message of a prompt that is too long contains a model's name and numbers, that of a server
    # which failed without a status is this project's.
    is_cut_off = isinstance(error, ServerFailedError) and error.status is None
    has_own_text = is_cut_off or isinstance(error, (*SETUP_ERRORS, PromptTooLongError))
    text = f"{name}: {error}" if has_own_text else name
    if not isinstance(error, EndpointError):
        return text
    if error.detail:
        text = text.removesuffix(f": {error.detail}")
    if not has_own_text and error.status is not None:
        text += f" {error.status}"
    fields = ((name, error.fields.get(name) or "") for name in ERROR_FIELDS)
    text += "".join(f" {name}={value}" for name, value in fields if ERROR_FIELD.fullmatch(value))
    return f"{text}: {error.hint}" if isinstance(error, MisconfiguredError) else text


class _RequestLine(NamedTuple):
    entry: Entry
    reason: str
    at: float
    fallback: str = ""
    client_id: str = ""
    trace_id: str = ""
    route_reason: str = ""


@contextmanager
def log_to(
    stream: TextIO | None = None, style: Style = "json", secrets: Iterable[str] = ()
) -> Iterator[Writer]:
    """Redirect all loggers of the process to a stream. On exit, the remaining lines are written if
    the stream accepts them within a second, and the earlier handlers return."""
    writer = Writer(stream or sys.stderr, style, scrubber(secrets))
    ours, hook = logging.getLogger("bottega"), threading.excepthook
    show_warning = warnings.showwarning
    level = ours.level
    before = [(one, one.handlers[:], one.propagate) for one in _loggers()]
    for one, _, _ in before:  # handlers of libraries such as uvicorn do not remove secrets
        one.handlers[:], one.propagate = [], True
    logging.getLogger().handlers[:] = [writer]
    _writers.append(writer)
    kind = logging.getLoggerClass()
    logging.setLoggerClass(_CapturedLogger)
    ours.setLevel(logging.INFO)
    threading.excepthook = _log_thread_error
    warnings.showwarning = _log_warning
    try:
        yield writer
    finally:
        _writers.remove(writer)
        logging.setLoggerClass(kind)
        for one, handlers, propagate in before:
            one.handlers[:], one.propagate = handlers, propagate
        ours.setLevel(level)
        threading.excepthook = hook
        warnings.showwarning = show_warning
        writer.close()


class _CapturedLogger(logging.Logger):
    """Logger class for libraries imported during `log_to`. It ignores their own handlers, which
    would write each line twice."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        if not _writers:
            super().addHandler(hdlr)

    def callHandlers(self, record: logging.LogRecord) -> None:
        if not _writers:
            super().callHandlers(record)
        for writer in _writers:  # even if the library has turned propagation off
            writer.handle(record)


def _loggers() -> list[logging.Logger]:
    loggers = logging.root.manager.loggerDict.values()
    return [logging.root, *(one for one in loggers if isinstance(one, logging.Logger))]


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Log the text only: the default format adds a line of source code."""
    logging.getLogger("bottega.warnings").warning("%s", str(message))


def _log_thread_error(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is not None:
        ours = logging.getLogger("bottega.threads")
        ours.error("a thread ended", exc_info=hook.exc_value)


class Writer(logging.Handler):
    """Log handler that writes queued lines several times a second. Logging does not wait for the
    stream; lines that do not fit into the queue are lost."""

    def __init__(self, stream: TextIO, style: Style, scrub: Scrub) -> None:
        super().__init__()
        self._stream = stream
        self._line = _json_line if style == "json" else _text_line
        self._scrub = scrub
        self._reported_lost = 0
        self._writer = BatchWriter[logging.LogRecord | _RequestLine, None](
            self._write,
            name="bottega-logs",
            max_batch=WRITE_BATCH,
            max_waiting=MAX_WAITING,
            seconds=FLUSH_SECONDS,
            daemon=True,
            logs_lost=False,  # this would add lines to the full queue
        )
        self.put = self._writer.put

    @property
    def lost(self) -> int:
        return self._writer.lost

    def emit(self, record: logging.LogRecord) -> None:
        self.put(record)

    def close(self) -> None:
        self._writer.close(timeout=1.0)
        super().close()

    def _write(self, records: Sequence[logging.LogRecord | _RequestLine]) -> list[None]:
        lines, lost = [self._text(one) for one in records], self.lost
        if lost > self._reported_lost:
            lines.append(self._line(_fields("warning", "lines lost", count=lost)))
        self._reported_lost = lost
        try:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError):  # the reader has closed the stream
            self._writer.lost += len(records)
        return [None] * len(records)

    def _text(self, record: logging.LogRecord | _RequestLine) -> str:
        try:
            if isinstance(record, _RequestLine):
                return self._line(_request(record, self._scrub))
            return self._line(_event(record, self._scrub))
        except Exception as error:  # arguments do not match the format string
            name = "bottega.requests" if isinstance(record, _RequestLine) else record.name
            return self._line(
                _fields("error", "log line failed", logger=name, error=error_text(error))
            )


def _fields(level: str, event: str, at: float | None = None, **more: object) -> dict[str, object]:
    return {
        "time": _iso_time(time.time() if at is None else at),
        "level": level,
        "event": event,
    } | more


def _iso_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _request(done: _RequestLine, scrub: Scrub) -> dict[str, object]:
    """Return the fields of a request's line. One literal, without `_fields`, takes half as long,
    and every request needs one."""
    entry = done.entry
    return {
        "time": _iso_time(done.at),
        "level": "info",
        "event": "request",
        "request": scrub(entry.request_id),
        "client_request": scrub(done.client_id) or None,
        "trace": done.trace_id or None,
        "account": entry.account,
        "namespace": scrub(entry.namespace),
        "status": entry.status,
        "state": entry.state,
        "route": entry.tier,
        "route_reason": scrub(done.route_reason) or None,
        "model": scrub(entry.model),
        "shots": entry.shots,
        "similarity": None if entry.similarity is None else round(entry.similarity, 4),
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "cost_usd": entry.cost_usd,
        "seconds": round(entry.seconds, 4),
        "fallback": done.fallback or None,
        "reason": scrub(done.reason) or None,
    }


def _event(record: logging.LogRecord, scrub: Scrub) -> dict[str, object]:
    arguments = record.args
    if isinstance(arguments, tuple):
        arguments = tuple(error_text(a) if isinstance(a, BaseException) else a for a in arguments)
    text = str(record.msg) % arguments if arguments else str(record.msg)
    ours = record.name.partition(".")[0] == "bottega"
    if isinstance(record.msg, BaseException):
        text = error_text(record.msg)
    elif not ours:  # libraries such as asyncio append whole exceptions on further lines
        text = text.strip().partition("\n")[0]
    fields = _fields(record.levelname.lower(), scrub(text), record.created, logger=record.name)
    if record.exc_info and record.exc_info[1] is not None:
        fields |= _failure(record.exc_info[1], scrub)
    return fields


def _failure(error: BaseException, scrub: Scrub) -> Mapping[str, object]:
    chain: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(chain) < FRAMES:
        chain.append(error_text(seen))
        seen = seen.__cause__ or seen.__context__
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return {
        "error": scrub(" <- ".join(chain)),
        "hint": scrub(error.hint) if isinstance(error, SETUP_ERRORS) else None,
        "at": " ".join(f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in frames),
    }


def _json_line(fields: Mapping[str, object]) -> str:
    return orjson.dumps(
        {name: value for name, value in fields.items() if value is not None},
        default=str,
        option=orjson.OPT_NON_STR_KEYS,
    ).decode()


def _text_line(fields: Mapping[str, object]) -> str:
    """Format for a terminal: time, level and event in columns, the rest as name=value."""
    rest = dict(fields)
    clock, level, event = (str(rest.pop(name)) for name in ("time", "level", "event"))
    more = " ".join(f"{name}={value}" for name, value in rest.items() if value not in (None, ""))
    return printable(f"{clock[11:23]} {level:<7} {event} {more}".rstrip())
