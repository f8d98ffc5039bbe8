"""Runner of batches: sends each line as a request of the key that created the batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from bottega._util.batch_writer import OutageLog
from bottega._util.caching import CLIENT, FairSemaphore
from bottega._util.durable_files import lock_file
from bottega._util.event_loops import for_each
from bottega.errors import BottegaError
from bottega.gateway.accounting.access import ANONYMOUS
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.apis.batches.batch_records import Batch, BatchStatus, LineError
from bottega.gateway.apis.batches.lines import (
    BatchLine,
    error_line,
    read_body,
    read_lines,
    reply_line,
)
from bottega.gateway.apis.batches.store import BatchStore
from bottega.gateway.config.gateway_settings import MB, BatchSettings
from bottega.gateway.errors import CLOSING, note_failure
from bottega.gateway.ports import ReadBody, RequestRecord
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.exchange import ChatEndpoint, request_id
from bottega.openai_api.errors import ApiError

log = logging.getLogger(__name__)

LOCK = "batches.lock"
DAY, HOUR = 86_400.0, 3600.0
POLL_SECONDS = 1.0
RETRY_SECONDS = 5.0
BUSY_SECONDS = 0.1
MAX_WAIT = 60.0
MAX_ACTIVE = 64  # batches; further ones wait
# Codes of errors after which the line is sent again.
RETRY_CODES = ("rate_limit_exceeded", "too_many_concurrent_requests", "decoding_busy")
UNSENT_ERRORS = {
    "expired": ("batch_expired", "the batch expired before this request was sent"),
    "failed": ("batch_failed", "the batch failed before this request was sent"),
}


class RequestCounter(Protocol):
    """Counter of the requests in progress, of clients and batches together."""

    in_flight: int
    closing: bool

    @property
    def limit(self) -> int: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


@dataclass
class ActiveBatch:
    """Batch in progress. `target` is the status in which it ends once `stop` is set."""

    batch: Batch
    path: Path
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    target: BatchStatus = "completed"
    errors: list[LineError] = field(default_factory=list)

    def end(self, target: BatchStatus, *errors: LineError) -> None:
        if not self.stop.is_set():
            self.target, self.errors = target, [*errors]
            self.stop.set()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)


@dataclass
class BatchRunner:
    """Runner of the batches in `store`, `settings.concurrency` lines at a time. `endpoints` maps
    paths to handlers; `account` returns the account with an id, None if its key is invalid. If
    several processes share `folder`, one of them runs the batches."""

    store: BatchStore
    gateway: Gateway
    settings: BatchSettings
    folder: Path
    account: Callable[[str], Account | None]
    requests: RequestCounter
    endpoints: Mapping[str, ChatEndpoint]
    clock: Callable[[], float] = time.time
    _active: dict[str, ActiveBatch] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _cleaned: float = 0.0

    def __post_init__(self) -> None:
        self._slots = FairSemaphore(self.settings.concurrency)

    def wake(self) -> None:
        """Look for new and cancelled batches now."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until cancelled. Then await `aclose`."""
        while not self.store.exists:  # no client has used batches yet
            await self._wait()
        lock = await self._lock()
        outage = OutageLog(log, logging.WARNING)
        try:
            while True:
                self._wake.clear()
                try:
                    await self._poll()
                    outage.ended("batches can be read again")
                except BottegaError as error:
                    outage.failed("batches cannot be read: %s", error)
                await self._wait()
        finally:
            await self._cancel_tasks()
            lock.close()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.store.close)

    async def _lock(self) -> IO[bytes]:
        outage = OutageLog(log, logging.WARNING)
        while True:
            try:
                lock = await asyncio.to_thread(lock_file, self.folder / LOCK)
            except OSError as error:
                outage.failed("%s cannot be opened: %s", self.folder / LOCK, error.strerror)
                lock = None
            if lock is not None:
                return lock
            await asyncio.sleep(RETRY_SECONDS)

    async def _poll(self) -> None:
        for batch in await asyncio.to_thread(self.store.unfinished):
            active = self._active.get(batch.id)
            if active is None and len(self._active) < MAX_ACTIVE and not self.requests.closing:
                active = ActiveBatch(batch, self.store.path(batch.input_file))
                self._active[batch.id] = active
                task = asyncio.create_task(self._run(active))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if active is not None:
                self._check_end(active, batch)
        if self.clock() - self._cleaned > HOUR:
            self._cleaned = self.clock()
            before = self._cleaned - self.settings.keep_days * DAY
            await asyncio.to_thread(self.store.remove_expired, before)

    def _check_end(self, active: ActiveBatch, batch: Batch) -> None:
        if batch.status == "cancelling":
            active.end("cancelled")
        elif self.clock() >= batch.expires:
            active.end("expired")
        elif self._account(batch) is None:
            active.end(
                "failed", LineError("invalid_api_key", "the key of the batch is no longer valid")
            )

    def _account(self, batch: Batch) -> Account | None:
        if self.gateway.authenticate is None:
            return ANONYMOUS
        account = self.account(batch.account)
        return None if account is None or account.viewer else account

    async def _run(self, active: ActiveBatch) -> None:
        CLIENT.set(active.batch.account)  # of this task and those of its lines: fair turns
        try:
            await self._run_lines(active)
        except BottegaError as error:
            log.warning("%s will be tried again: %s", active.batch.id, error)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("%s will be tried again", active.batch.id)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._active[active.batch.id]

    async def _run_lines(self, active: ActiveBatch) -> None:
        store, read = self.store, active.batch
        # Read again: it may have ended since `_poll` read it, and its results are deleted then.
        batch = active.batch = await asyncio.to_thread(store.batch, read.account, read.id)
        if batch.is_finished:
            return
        if not await asyncio.to_thread(active.path.exists):
            active.end("failed", LineError("missing_file", "the input file no longer exists"))
            await self._finish(active, [])
            return
        is_new = batch.status == "validating"
        # Limits that were lowered meanwhile do not fail a batch with results.
        line_mb = self.gateway.limits.body_mb if is_new else self.settings.file_mb
        lines, errors = await asyncio.to_thread(
            read_lines,
            active.path,
            batch.endpoint,
            max_requests=max(self.settings.max_requests, batch.total),
            max_bytes=line_mb * MB,
        )
        if errors:
            await asyncio.to_thread(store.fail, batch.id, errors)
            return
        if is_new:
            await asyncio.to_thread(store.start, batch.id, len(lines))
        done = await asyncio.to_thread(store.done_lines, batch.id)
        await for_each(
            [line for line in lines if line.number not in done],
            lambda line: self._run_line(active, line),
            limit=self.settings.concurrency,
            starts=lambda: not (active.stop.is_set() or self.requests.closing),
        )
        if not self.requests.closing:
            await self._finish(active, lines)

    async def _finish(self, active: ActiveBatch, lines: Collection[BatchLine]) -> None:
        batch = active.batch
        await asyncio.to_thread(
            self.store.change_status, batch.id, "finalizing", before=("in_progress",)
        )
        unsent: list[bytes] = []
        if active.target in UNSENT_ERRORS:
            done = await asyncio.to_thread(self.store.done_lines, batch.id)
            left = [line for line in lines if line.number not in done]
            unsent = [error_line(line, *UNSENT_ERRORS[active.target]) for line in left]
        await asyncio.to_thread(self.store.finish, batch, active.target, active.errors, unsent)

    async def _run_line(self, active: ActiveBatch, line: BatchLine) -> None:
        """Send a request until it is answered, and store its output."""
        while not (active.stop.is_set() or self.requests.closing):
            if self._is_busy():
                await active.wait(BUSY_SECONDS)
                continue
            async with self._slots.hold():
                seconds = await self._send_once(active, line)
            if seconds is None:
                return
            await active.wait(seconds)

    def _is_busy(self) -> bool:
        """Return whether half of the gateway's slots are in use: the rest is for clients."""
        return self.requests.in_flight * 2 >= max(2, self.requests.limit)

    async def _send_once(self, active: ActiveBatch, line: BatchLine) -> float | None:
        """Send a request once and store its output. Return the seconds until it may be sent again,
        None if it has a final reply."""
        account = self._account(active.batch)
        if active.stop.is_set() or self.requests.closing or account is None:
            return POLL_SECONDS
        body = partial(asyncio.to_thread, read_body, active.path, line)
        record = RequestRecord(request_id())
        self.requests.begin()
        try:
            found = await self._reply(active.batch.endpoint, record, account, body)
            if isinstance(found, ApiError) and _may_repeat(found):
                return _seconds(found)
            payload = found.body if isinstance(found, ApiError) else found
            output = reply_line(line, record.request_id, record.status, payload)
            await self._store(active, line, output, failed=record.status != 200)
            return None
        finally:
            self.requests.end()

    async def _reply(
        self, path: str, record: RequestRecord, account: Account, body: ReadBody
    ) -> ApiError | bytes:
        endpoint = self.endpoints[path]
        try:
            await self.gateway.enter(record, account)
        except ApiError as error:
            if error.code in RETRY_CODES:  # not sent, so it is no request yet
                if record.entered:
                    self.gateway.access.leave(account)
                return error
            return self._record_failure(endpoint, record, error)
        with endpoint.measure(record, {"path": path}, {}):
            return await self._answer(endpoint, record, body)

    async def _answer(
        self, endpoint: ChatEndpoint, record: RequestRecord, body: ReadBody
    ) -> ApiError | bytes:
        try:
            reply = await endpoint.answer(record, {}, body)
        except asyncio.CancelledError:
            record.state, record.status, record.reason = "failed", CLOSING.status, "shutting down"
            endpoint.on_end(record)
            raise
        except Exception as error:
            return self._record_failure(endpoint, record, error)
        endpoint.on_end(record)
        return reply.payload

    def _record_failure(
        self, endpoint: ChatEndpoint, record: RequestRecord, error: Exception
    ) -> ApiError:
        api_error = note_failure(record, error)
        endpoint.on_end(record)
        return api_error

    async def _store(
        self, active: ActiveBatch, line: BatchLine, output: bytes, *, failed: bool
    ) -> None:
        """Store an output. Try again after a failure: a full disk must not lose a paid reply."""
        while True:
            try:
                await asyncio.to_thread(
                    self.store.add_result, active.batch.id, line.number, output, failed=failed
                )
                return
            except BottegaError as error:
                log.warning("an output of %s cannot be stored yet: %s", active.batch.id, error)
                await asyncio.sleep(RETRY_SECONDS)


def _may_repeat(error: ApiError) -> bool:
    has_wait = "retry-after" in error.headers  # such as an upstream that is paused
    return error.code in RETRY_CODES or (has_wait and (error.code or "").startswith("upstream_"))


def _seconds(error: ApiError) -> float:
    """Return the seconds after which the error suggests another attempt."""
    milliseconds = error.headers.get("retry-after-ms")
    text = error.headers.get("retry-after", "1")
    seconds = float(milliseconds) / 1000 if milliseconds else float(text)
    return min(max(seconds, 0.02), MAX_WAIT)
