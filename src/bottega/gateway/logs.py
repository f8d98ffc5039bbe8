"""Lines for whoever runs the gateway: one JSON object for each request and each event.

Never in them: prompts, replies, image bytes, keys, query strings. Of an exception that is not about
the operator's own set-up only type and place are told: its message may quote what a client sent.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Literal, Protocol, TextIO

import orjson

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    MissingDependencyError,
    ModelLoadError,
    SettingError,
    StoreError,
    UnreachableError,
)
from bottega.gateway.scrubbing import Scrub, printable, scrubber
from bottega.gateway.upstream_errors import MisconfiguredError

Style = Literal["json", "text"]
STYLES: tuple[Style, ...] = ("json", "text")
MOST_WAITING = 10_000  # lines, while a terminal stands still
AT_ONCE = 500
FRAMES = 12
# What these say is about files, settings, packages and hosts.
ABOUT_SETUP = (
    SettingError,
    StoreError,
    MissingDependencyError,
    ModelLoadError,
    UnreachableError,
    EndpointTimeoutError,
    MisconfiguredError,
)

requests = logging.getLogger("bottega.requests")


class Logged(Protocol):
    """Of the ledger's entry what a line tells."""

    @property
    def request_id(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def shots(self) -> int: ...
    @property
    def similarity(self) -> float | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cost_usd(self) -> float | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def status(self) -> int: ...


def log_request(entry: Logged, why: str = "") -> None:
    """The line of one request, and in a word why it failed or passed straight through. It is
    written by another thread: this takes a few microseconds."""
    if requests.isEnabledFor(logging.INFO):
        record = logging.LogRecord(requests.name, logging.INFO, "", 0, "request", None, None)
        record.request, record.why = entry, why
        requests.handle(record)


def told(error: BaseException) -> str:
    """What of an error may stand in a log."""
    name = type(error).__name__
    if isinstance(error, ABOUT_SETUP):
        return f"{name}: {error}"
    if isinstance(error, EndpointError) and error.status is not None:
        return f"{name} {error.status}"
    return name


@contextmanager
def logging_to(
    stream: TextIO | None = None, style: Style = "json", secrets: Iterable[str] = ()
) -> Iterator[Writer]:
    """All loggers of the process write there, instead of where they did. What was logged is
    written when this ends, if the stream takes it within a second."""
    writer = Writer(stream or sys.stderr, style, scrubber(secrets))
    ours, hook = logging.getLogger("bottega"), threading.excepthook
    level = ours.level
    before = [(one, one.handlers[:], one.propagate) for one in _loggers()]
    for one, _, _ in before:  # uvicorn, for one, brings handlers that hide nothing
        one.handlers[:], one.propagate = [], True
    logging.getLogger().handlers[:] = [writer]
    ours.setLevel(logging.INFO)
    threading.excepthook = _of_thread
    try:
        yield writer
    finally:
        for one, handlers, propagate in before:
            one.handlers[:], one.propagate = handlers, propagate
        ours.setLevel(level)
        threading.excepthook = hook
        writer.close()


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(one for one in known if isinstance(one, logging.Logger))]


def _of_thread(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is not None:
        ours = logging.getLogger("bottega.threads")
        ours.error("a thread ended", exc_info=hook.exc_value)


class Writer(logging.Handler):
    """Lines go through a queue to a thread: nobody who logs waits for a terminal, and what does
    not fit into the queue is counted as `lost`."""

    def __init__(self, stream: TextIO, style: Style, scrub: Scrub) -> None:
        super().__init__()
        self.lost = 0
        self._stream = stream
        self._line = _json_line if style == "json" else _text_line
        self._scrub = scrub
        self._waiting: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="bottega-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(record)
        else:
            self.lost += 1

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(timeout=1.0)
        super().close()

    def _write(self) -> None:
        ended, told_lost = False, 0
        while not ended:
            records = [self._waiting.get()]
            while len(records) < AT_ONCE and not self._waiting.empty():
                records.append(self._waiting.get())
            ended = None in records
            lines = [self._text(record) for record in records if record is not None]
            if self.lost > told_lost:
                lines.append(self._line(_fields("warning", "lines lost", count=self.lost)))
                told_lost = self.lost
            try:
                self._stream.write("".join(f"{line}\n" for line in lines))
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more
                self.lost += len(lines)

    def _text(self, record: logging.LogRecord) -> str:
        try:
            make = _request if hasattr(record, "request") else _event
            return self._line(make(record, self._scrub))
        except Exception as error:  # a message that its arguments do not fit
            return self._line(
                _fields("error", "a line failed", logger=record.name, error=told(error))
            )


def _fields(level: str, event: str, at: float | None = None, **more: object) -> dict[str, object]:
    now = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return {"time": now.isoformat(timespec="milliseconds"), "level": level, "event": event, **more}


def _request(record: logging.LogRecord, scrub: Scrub) -> dict[str, object]:
    entry: Logged = record.request  # type: ignore[attr-defined]
    why: str = record.why  # type: ignore[attr-defined]
    return _fields(
        "info",
        "request",
        record.created,
        request=scrub(entry.request_id),
        account=entry.account,
        namespace=scrub(entry.namespace),
        status=entry.status,
        state=entry.state,
        route=entry.route,
        model=scrub(entry.model),
        shots=entry.shots,
        similarity=None if entry.similarity is None else round(entry.similarity, 4),
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        cost_usd=entry.cost_usd,
        seconds=round(entry.seconds, 4),
        why=scrub(why) or None,
    )


def _event(record: logging.LogRecord, scrub: Scrub) -> dict[str, object]:
    arguments = record.args
    if isinstance(arguments, tuple):
        arguments = tuple(told(a) if isinstance(a, BaseException) else a for a in arguments)
    text = str(record.msg) % arguments if arguments else str(record.msg)
    ours = record.name.partition(".")[0] == "bottega"
    if isinstance(record.msg, BaseException):
        text = told(record.msg)
    elif not ours:  # asyncio, for one, shows whole exceptions below
        text = text.strip().partition("\n")[0]
    fields = _fields(record.levelname.lower(), scrub(text), record.created, logger=record.name)
    if record.exc_info and record.exc_info[1] is not None:
        fields |= _failure(record.exc_info[1], scrub)
    return fields


def _failure(error: BaseException, scrub: Scrub) -> Mapping[str, object]:
    chain: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(chain) < FRAMES:
        chain.append(told(seen))
        seen = seen.__cause__ or seen.__context__
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return {
        "error": scrub(" <- ".join(chain)),
        "hint": scrub(error.hint) if isinstance(error, ABOUT_SETUP) else None,
        "at": " ".join(f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in frames),
    }


def _json_line(fields: Mapping[str, object]) -> str:
    return orjson.dumps(
        {name: value for name, value in fields.items() if value is not None},
        default=str,
        option=orjson.OPT_NON_STR_KEYS,
    ).decode()


def _text_line(fields: Mapping[str, object]) -> str:
    """For people: time, level and event in columns, the rest as name=value."""
    rest = dict(fields)
    clock, level, event = (str(rest.pop(name)) for name in ("time", "level", "event"))
    more = " ".join(f"{name}={value}" for name, value in rest.items() if value not in (None, ""))
    return printable(f"{clock[11:23]} {level:<7} {event} {more}".rstrip())
