"""Ledger of requests and their cost, written in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson

from bottega._util.batch_writer import LoopWriter, OutageLog, WriterThread
from bottega._util.postgres import PostgresPool
from bottega._util.progress import plural
from bottega._util.sql_tables import DatabaseTables, SqlDialect, SqlRow, dollars
from bottega.errors import BottegaError
from bottega.gateway.accounting.ledger_database import (
    AccountMonth,
    FileLedger,
    LedgerBatch,
    LedgerStore,
    SharedLedger,
    month_bounds,
    month_of,
    open_tables,
)
from bottega.gateway.accounting.ledger_schema import DAY, RULES_VERSION, Entry, ShadowSample

log = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0
MAX_PENDING = 100_000
WriteCallback = Callable[[BaseException | None], None]
"""Called with the error of a write, or with None after its commit."""
GATE, REPEAT, MASTER, LOST = "gate:", "replay:", "master", "lost"
HOURLY_PRICES = "usd_per_hour"


class PendingRows:
    """Rows in memory, written one batch at a time: call `take`, then `written` or `restore`. `lost`
    counts the rows dropped above `MAX_PENDING`. All methods take microseconds and may be called
    from any thread."""

    def __init__(self, stored: Mapping[AccountMonth, float]) -> None:
        self.lost = 0
        self.unsaved_lost = 0  # lost rows that the store does not count yet
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._shadows: list[ShadowSample] = []
        self._notes: dict[str, str] = {}
        self._writing_notes: Mapping[str, str] = {}
        self._waiters: list[WriteCallback] = []
        # Each cost is in exactly one of these three, so spending never decreases during a write.
        self._stored = dict(stored)
        self._waiting: dict[AccountMonth, float] = {}
        self._writing: Mapping[AccountMonth, float] = {}

    def add(self, entry: Entry, month: str, usd: float) -> None:
        with self._lock:
            # Under one lock, so a write takes an entry together with its cost.
            self._entries.append(entry)
            if usd:
                key = (month, entry.account)
                self._waiting[key] = self._waiting.get(key, 0.0) + usd

    def add_shadow(self, shadow: ShadowSample) -> None:
        with self._lock:
            self._shadows.append(shadow)

    def set_note(self, name: str, value: str) -> None:
        with self._lock:
            self._notes[name] = value

    def note(self, name: str) -> str | None:
        """Return a note that is not stored yet."""
        with self._lock:
            return self._notes.get(name, self._writing_notes.get(name))

    def wait(self, waiter: WriteCallback) -> None:
        """Call `waiter` after the next write."""
        with self._lock:
            self._waiters.append(waiter)

    def spent(self, month: str, account: str) -> float:
        """Return the spending in US dollars, including rows that are not written yet."""
        with self._lock:
            parts = (self._stored, self._writing, self._waiting)
            return sum(part.get((month, account), 0.0) for part in parts)

    def committed(self, month: str, account: str) -> float:
        """Return the spending as it was last written or read."""
        with self._lock:
            return self._stored.get((month, account), 0.0)

    def read(self, stored: Mapping[AccountMonth, float]) -> None:
        """Update the stored spending, which includes that of other processes."""
        with self._lock:
            self._stored.update(stored)

    def take(self) -> tuple[LedgerBatch, Sequence[WriteCallback]]:
        with self._lock:
            waiters, self._waiters = self._waiters, []
            self._writing, self._writing_notes = self._waiting, self._notes
            batch = LedgerBatch(
                self._entries, self._shadows, self._notes, self._waiting, self.unsaved_lost
            )
            self._entries, self._shadows = [], []
            self._notes, self._waiting, self.unsaved_lost = {}, {}, 0
            return batch, waiters

    def written(self, stored: Mapping[AccountMonth, float]) -> None:
        """Count the batch as stored. `stored` is newer spending of some accounts."""
        with self._lock:
            for key, usd in self._writing.items():
                self._stored[key] = self._stored.get(key, 0.0) + usd
            self._stored.update(stored)
            self._writing, self._writing_notes = {}, {}

    def restore(self, batch: LedgerBatch) -> None:
        """Return a batch that could not be written to the pending rows."""
        with self._lock:
            entries, shadows = [*batch.entries, *self._entries], [*batch.shadows, *self._shadows]
            lost = max(0, len(entries) - MAX_PENDING) + max(0, len(shadows) - MAX_PENDING)
            self._entries, self._shadows = entries[-MAX_PENDING:], shadows[-MAX_PENDING:]
            self._notes = {**batch.notes, **self._notes}  # a newer value wins
            for key, usd in batch.spent.items():
                self._waiting[key] = self._waiting.get(key, 0.0) + usd
            self._writing, self._writing_notes = {}, {}
            self.unsaved_lost += batch.lost + lost
            self.lost += lost

    def count_lost(self) -> None:
        """Count the pending rows as lost."""
        with self._lock:
            self.lost += len(self._entries) + len(self._shadows)


class Ledger:
    """Ledger in gateway.db, or in PostgreSQL if `location` is a URL.

    A thread writes it, and between `enter_loop` and `leave_loop` an event loop. The file is written
    within half a second, which a killed process loses; PostgreSQL is written at once, and `flushed`
    waits for the commit. `close` writes everything. If the store cannot be written, requests
    continue. Rows wait in memory, and the oldest are `lost` when there are too many, or on `close`.

    Spending includes that of other processes as of their last write: in PostgreSQL that of accounts
    `with_budgets`, and of all accounts after `refresh_spending`. `shared` is the store in
    PostgreSQL, None for a file. With `keep_days`, older rows are deleted; monthly spending is kept.
    Reading blocks.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        create: bool = True,
        keep_days: float | None = None,
        repeat_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keep_days = keep_days
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        tables = open_tables(location, create=create)
        self.dialect: SqlDialect = tables.dialect
        self.shared = SharedLedger(tables) if isinstance(tables, DatabaseTables) else None
        self._store: LedgerStore = self.shared or FileLedger(tables)
        self._name = Path(location).name if self.shared is None else "PostgreSQL"
        self._store_lock = threading.Lock()
        self._set_month(clock())
        try:
            self._rows = PendingRows(self._store.spent_since(self._month))
        except BaseException:
            self._store.close()
            raise
        self._outage = OutageLog(log)
        self.with_budgets: set[str] = set()  # accounts whose committed spending decides
        self._pruned_at = float("-inf")
        self._closed = threading.Event()
        self._in_loop: LoopWriter | None = None
        self._thread = WriterThread(
            lambda: self._attempt(self._flush_in_thread) and self._attempt(self._prune_hourly),
            name="bottega-ledger",
            seconds=self._store.flush_seconds,
            daemon=True,
        )
        self._writer: LoopWriter | WriterThread = self._thread

    @property
    def lost(self) -> int:
        return self._rows.lost

    @property
    def is_failing(self) -> bool:
        return self._outage.lasts

    async def enter_loop(self, pool: PostgresPool) -> None:
        """Write in this event loop, which owns the pool, instead of the thread, so a commit needs
        no switch of threads. Only one event loop may do so."""

        def stop_thread() -> None:
            with self._store_lock:  # wait for the batch that is being written
                self._in_loop = writer

        writer = LoopWriter(lambda: self._flush_in_loop(pool))
        await asyncio.to_thread(stop_thread)
        self._writer = writer
        writer.wake()

    async def leave_loop(self) -> None:
        """Write in the thread again, after the rows added so far."""
        if self._in_loop is not None:
            self._writer = self._thread
            await self._in_loop.aclose()
            self._in_loop = None
            self._thread.wake()

    def record(self, entry: Entry) -> None:
        """Add an entry. Takes microseconds; callable from any thread."""
        entry.id = self._store.new_id()
        self._rows.add(entry, self.month_at(entry.time), dollars(entry.cost_usd) or 0.0)
        self._writer.wake()

    def durable(self) -> asyncio.Future[BaseException | None]:
        """Return a future whose result is None once all rows added so far are durable, or the error
        of the next write, after which the rows stay in memory."""
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def resolve(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(error)

        def end(error: BaseException | None) -> None:
            if threading.get_ident() == thread:
                resolve(error)
            else:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(resolve, error)

        self._rows.wait(end)
        self._writer.wake()
        return done

    async def flushed(self) -> None:
        """Wait until all rows added so far are durable. Raises the error of `durable`."""
        if (error := await self.durable()) is not None:
            raise error

    def record_shadow(self, shadow: ShadowSample) -> None:
        self._rows.add_shadow(replace(shadow, id=self._store.new_id()))
        self._writer.wake()

    def set_gate(self, namespace: str, retrieve: str, state: str) -> None:
        """Store the state of a gate as JSON. `retrieve` is the retrieval method of its samples.
        Does not block."""
        self._set_note(_gate_note(namespace, retrieve), state)

    def gate(self, namespace: str, retrieve: str) -> str | None:
        return self._note(_gate_note(namespace, retrieve))

    def set_repeat(self, key: str, example: str) -> None:
        """Record the id of the stored answer to the request with this `exact_key`. Does not
        block."""
        self._set_note(REPEAT + key, f"{self._clock()} {example}")

    def repeat(self, key: str) -> tuple[float, str] | None:
        """Return the time of the answer and its id; None after `repeat_seconds`, and while the
        ledger cannot be written. Blocks."""
        if self.is_failing:
            return None
        moment, _, example = (self._note(REPEAT + key) or "0 ").partition(" ")
        then = float(moment)
        return (then, example) if then > self._clock() - self._repeat_seconds else None

    def delete_old_repeats(self) -> int:
        """Delete records older than `repeat_seconds`. Return their number."""
        with self._store_lock:
            return self._store.delete_notes(REPEAT, self._clock() - self._repeat_seconds)

    def set_master(self, route: str) -> None:
        """Set the tier whose cost savings are computed from."""
        self._set_note(MASTER, route)

    def master(self) -> str | None:
        return self._note(MASTER)

    def set_hourly_prices(self, usd: Mapping[str, float]) -> None:
        """Set the cost of each tier's servers per hour, in US dollars."""
        self._set_note(HOURLY_PRICES, orjson.dumps(usd).decode())

    def hourly_prices(self) -> dict[str, float]:
        return dict(orjson.loads(self._note(HOURLY_PRICES) or "{}"))

    def total_lost(self) -> int:
        """Return the number of lost rows that all processes have recorded. Blocks."""
        return int(self._note(LOST) or 0)

    def refresh_spending(self) -> None:
        """Read the spending of all accounts, as of the last writes of all processes. Blocks."""
        with self._store_lock:
            self._read_spending(None)

    def committed_this_month(self, account: str, /) -> float:
        """Return the account's spending as of the last write of one of its entries."""
        return self._rows.committed(self.month_at(self._clock()), account)

    def spent_this_month(self, account: str, /) -> float:
        """Return the account's spending in US dollars, from memory: up to the last request of this
        process, and up to the last write of others."""
        return self._rows.spent(self.month_at(self._clock()), account)

    def read(self, sql: str, *values: object) -> list[SqlRow]:
        """Run a report's query without delaying the writer."""
        return self._store.tables.report(sql, *values)

    def execute(self, sql: str, *values: object) -> None:
        """Run one statement that writes, in its own transaction. It runs again after a lost
        connection, so a second run must change nothing. Blocks. Raises `StoreError`."""
        with self._store_lock:
            self._store.tables.execute(sql, *values)

    def flush(self) -> None:
        """Write the pending rows. Raises `StoreError`, after which they stay pending. Blocks."""
        with self._store_lock:
            if (in_loop := self._in_loop) is None:
                self._flush_here()
                return
        asyncio.run_coroutine_threadsafe(self.flushed(), in_loop.loop).result()

    def _flush_in_thread(self) -> None:
        with self._store_lock:
            if self._in_loop is None:
                self._flush_here()

    def _flush_here(self) -> None:
        batch, waiters = self._rows.take()
        try:
            if not batch.is_empty:
                self._write(batch)
        except BaseException as error:
            _end(waiters, error)
            raise
        _end(waiters, None)

    def _write(self, batch: LedgerBatch) -> None:
        try:
            self._store.write(batch)
        except BaseException:
            self._rows.restore(batch)
            raise
        # First move the costs in one step, then read the spending of other processes.
        self._rows.written({})
        accounts = self._budget_accounts(batch)
        if accounts or self.shared is None:
            self._read_spending(accounts)

    def _budget_accounts(self, batch: LedgerBatch) -> set[str]:
        """Return the accounts of a batch whose committed spending must be read. In PostgreSQL, the
        spending of other accounts is read when they are listed."""
        accounts = {account for _, account in batch.spent}
        return accounts if self.shared is None else accounts & self.with_budgets

    async def _flush_in_loop(self, pool: PostgresPool) -> bool:
        assert self.shared is not None
        batch, waiters = self._rows.take()
        try:
            if not batch.is_empty:
                month, accounts = month_of(self._clock()), self._budget_accounts(batch)
                self._rows.written(await self.shared.write_in(pool, batch, month, accounts))
        except BaseException as error:
            self._rows.restore(batch)
            _end(waiters, error)
            if not isinstance(error, BottegaError):
                raise
            self._log_failure(error)
            return False
        _end(waiters, None)
        self._log_recovery()
        if self._is_prune_due():
            self._thread.wake()
        return True

    def _read_spending(self, accounts: Collection[str] | None) -> None:
        self._rows.read(self._store.spent_since(month_of(self._clock()), accounts))

    def prune(self, keep_days: float) -> int:
        """Delete entries and shadows older than `keep_days`. Return their number."""
        before, total = self._clock() - keep_days * DAY, 0
        while not self._closed.is_set():
            with self._store_lock:  # released between batches: a long deletion would stop writes
                deleted = self._store.prune(before)
            if not deleted:
                break
            total += deleted
        return total

    def close(self) -> None:
        """Write the pending rows and stop. Rows that cannot be written are lost, and logged."""
        # First, so that a long `prune` ends after its current batch.
        self._closed.set()
        with self._store_lock:
            self._in_loop = None
        self._thread.close()
        # The thread has ended: rows added since then are written here.
        if not self._attempt(self.flush):
            self._rows.count_lost()
            log.error(
                "lost %s that could not be written to %s", plural(self.lost, "row"), self._name
            )
        with self._store_lock:
            self._store.close()

    def month_at(self, moment: float) -> str:
        """Return `month_of(moment)` from a cache, in a tenth of the time."""
        if not self._month_begins <= moment < self._month_ends:
            self._set_month(moment)
        return self._month

    def _set_month(self, moment: float) -> None:
        self._month = month_of(moment)
        self._month_begins, self._month_ends = month_bounds(moment)

    def _set_note(self, name: str, value: str) -> None:
        self._rows.set_note(name, value)
        self._writer.wake()

    def _note(self, name: str) -> str | None:
        if (waiting := self._rows.note(name)) is not None:
            return waiting
        with self._store_lock:
            rows = self._store.tables.execute(
                "SELECT value FROM gateway_notes WHERE name = ?1", name
            )
            return str(rows[0][0]) if rows else None

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do the work and return whether it succeeded. Log only the first of repeated failures."""
        try:
            work()
        except BottegaError as error:
            self._log_failure(error)
            return False
        self._log_recovery()
        return True

    def _log_failure(self, error: BottegaError) -> None:
        self._outage.failed("cannot write the ledger, requests continue: %s", error)

    def _log_recovery(self) -> None:
        self._outage.ended("the ledger can be written again; rows lost: %d", self.lost)

    def _is_prune_due(self) -> bool:
        return time.monotonic() - self._pruned_at > PRUNE_SECONDS

    def _prune_hourly(self) -> None:
        if not self._is_prune_due():
            return
        self._pruned_at = time.monotonic()
        if self._repeat_seconds:
            self.delete_old_repeats()
        if self._keep_days is not None:
            self.prune(self._keep_days)


def _gate_note(namespace: str, retrieve: str) -> str:
    """Return the name of the note with the state of a gate, which other rules did not measure."""
    return f"{retrieve}-{GATE}{RULES_VERSION}:{namespace}"


def _end(waiters: Sequence[WriteCallback], error: BaseException | None) -> None:
    for waiter in waiters:
        waiter(error)
