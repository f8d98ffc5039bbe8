"""Background writing: a thread or task that exists while there is work, batches of records, and the
log of outages."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from bottega._util.progress import plural
from bottega.errors import StoreError

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)
LOG_SECONDS = 60.0


class WriterThread:
    """Thread that calls `write` within `seconds` after `wake`, and ends when nothing is left.

    A `write` that returns False is repeated after `retry_seconds`. The interpreter waits at exit
    for a thread that is not a `daemon`.
    """

    def __init__(
        self,
        write: Callable[[], bool],
        *,
        name: str,
        seconds: float = 0.0,
        retry_seconds: float = 1.0,
        daemon: bool = False,
    ) -> None:
        self.seconds, self.retry_seconds = seconds, retry_seconds
        self._write, self._name, self._daemon = write, name, daemon
        # Reentrant: creating a thread may run a finalizer that logs, and logging calls `wake`.
        self._lock = threading.RLock()
        self._woken = self._running = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> bool:
        """Request a write of everything added so far; return False after `close`. Takes
        microseconds; callable from any thread."""
        # No lock: the flag is cleared before a write takes its records.
        if self._woken and self._running:
            return True
        with self._lock:
            if self._closed.is_set() and not self._running:
                return False
            self._woken = True
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name=self._name, daemon=self._daemon)
                try:
                    thread.start()
                except BaseException:  # at the limit of threads: the next wake tries again
                    self._running = False
                    raise
                self._thread = thread
        return True

    def close(self, timeout: float | None = None) -> None:
        """Stop after the writes requested so far, without further retries."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:  # in one step: a wake must see the thread end or keep it running
                if not self._woken:
                    self._running = False
                    return
            if self.seconds:
                self._closed.wait(self.seconds)  # collect a batch
            self._woken = False
            try:
                done = self._write()
            except BaseException:
                with self._lock:  # the next wake starts another thread
                    self._running = False
                raise
            if not done and not self._closed.wait(self.retry_seconds):
                self._woken = True


class LoopWriter:
    """`WriterThread` without a thread: a task of the current event loop calls `write`, which saves
    two thread switches per write."""

    def __init__(self, write: Callable[[], Awaitable[bool]], *, retry_seconds: float = 1.0) -> None:
        self.retry_seconds = retry_seconds
        self.loop = asyncio.get_running_loop()
        self._write = write
        self._thread = threading.get_ident()
        self._woken = False
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> bool:
        """Request a write of everything added so far; return False after `aclose`. Takes
        microseconds; callable from any thread."""
        if self._closed.is_set():
            return False
        if threading.get_ident() == self._thread:
            self._start()
        else:
            self.loop.call_soon_threadsafe(self._start)
        return True

    async def aclose(self) -> None:
        """Stop after the writes requested so far, without further retries."""
        self._closed.set()
        if self._task is not None:
            await self._task

    def _start(self) -> None:
        self._woken = True
        if self._task is None:
            self._task = self.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._woken:
                self._woken = False
                if not await self._write() and not await self._closes_within(self.retry_seconds):
                    self._woken = True
        finally:
            self._task = None

    async def _closes_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        return self._closed.is_set()


class BatchWriter(Generic[RecordT, ResultT]):
    """Writer that passes waiting records to `write_batch`, up to `max_batch` at once, one call at a
    time. `write_batch` returns a result for each record.

    `write` is acknowledged: it returns when the record is written, or raises the error of its
    batch. `put` is not: it returns at once, and records above `max_waiting` or of a failed batch
    count as `lost`, which is logged once in `LOG_SECONDS` if `logs_lost`.
    """

    def __init__(
        self,
        write_batch: Callable[[list[RecordT]], Sequence[ResultT]],
        *,
        name: str,
        max_batch: int = 256,
        max_waiting: int = 10_000,
        seconds: float = 0.0,
        daemon: bool = False,
        logs_lost: bool = True,
    ) -> None:
        self.lost = 0
        self._logs_lost, self._unlogged, self._logged_at = logs_lost, 0, -math.inf
        self._write_batch = write_batch
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._waiting: deque[tuple[RecordT, Future[ResultT] | None]] = deque()
        self._thread = WriterThread(self._write_all, name=name, seconds=seconds, daemon=daemon)

    async def write(self, record: RecordT) -> ResultT:
        """Write a record. Cancelling the caller does not cancel the write. Raises `StoreError`
        after `close`."""
        done: Future[ResultT] = Future()
        self._waiting.append((record, done))
        if not self._thread.wake():
            raise StoreError("the writer is closed", hint="open the store again")
        return await asyncio.wrap_future(done)

    def put(self, record: RecordT) -> None:
        """Add a record to be written soon. Takes microseconds; callable from any thread."""
        if len(self._waiting) < self._max_waiting:
            self._waiting.append((record, None))
            self._thread.wake()
        else:
            self._lose(1, None)

    def close(self, timeout: float | None = None) -> None:
        """Write the waiting records, for at most `timeout` seconds, and stop."""
        self._thread.close(timeout)
        if self._unlogged:
            log.error("lost %s", plural(self._unlogged, "more record"))

    def _lose(self, count: int, error: BaseException | None) -> None:
        """Count lost records. A broken file fails with each batch: one message would bury the
        others of the log."""
        self._unlogged += count if self._logs_lost else 0
        if self._unlogged and time.monotonic() - self._logged_at >= LOG_SECONDS:
            log.error("lost %s", plural(self._unlogged, "record"), exc_info=error)
            self._unlogged, self._logged_at = 0, time.monotonic()
        self.lost += count

    def _write_all(self) -> bool:
        while self._waiting:
            count = min(self._max_batch, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            # A running future cannot be cancelled, so setting its result cannot fail.
            waiters = [
                done if done is not None and done.set_running_or_notify_cancel() else None
                for _, done in batch
            ]
            try:
                results = self._write_batch([record for record, _ in batch])
            except BaseException as error:
                for waiter in waiters:
                    if waiter is not None:
                        waiter.set_exception(error)
                if lost := sum(done is None for _, done in batch):
                    self._lose(lost, error)
                continue
            for waiter, result in zip(waiters, results, strict=True):
                if waiter is not None:
                    waiter.set_result(result)
        return True


class OutageLog:
    """Logger for one service that many calls use. It logs the first failure of an outage at once,
    and further failures once in `LOG_SECONDS`. Unexpected exceptions have the level ERROR."""

    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        self.lasts = False
        self._log, self._level, self._logged_at = log, level, -math.inf

    def failed(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        if not self.lasts:
            self._logged_at = -math.inf
        self.lasts = True
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            level = self._level if exc_info is None else logging.ERROR
            self._log.log(level, message, *values, exc_info=exc_info)
            self._logged_at = time.monotonic()

    def ended(self, message: str, *values: object) -> None:
        """Log the message if there was an outage."""
        if self.lasts:
            self.lasts = False
            self._log.warning(message, *values)
