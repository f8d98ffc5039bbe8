"""What every request was and what it cost, kept without making any wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bottega.errors import BottegaError
from bottega.gateway.accounting.entries import (
    AccountMonth,
    Batch,
    Entry,
    EntryFile,
    Row,
    Shadow,
    Spent,
    State,
    Value,
    dollars,
    month_bounds,
    month_of,
)

__all__ = ["Entry", "Ledger", "Shadow", "State"]

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.3
RETRY_SECONDS = 1.0
MAX_WAITING = 100_000
PRUNE_SECONDS = 3600.0
DAY = 86_400.0
GATE, REPEAT, MASTER, LOST = "gate:", "repeat:", "master", "lost"
NOTHING = Spent()
AccountSpending = dict[AccountMonth, Spent]


class Ledger:
    """Entries in gateway.db, written by a thread within half a second: a process that is killed
    loses the last half second, `close` loses nothing. What several processes write is counted
    together as soon as each of them writes.

    Where the file cannot be written, requests go on: rows wait in memory, and the oldest are `lost`
    when there are too many, or on `close`. With `keep_days` older rows are forgotten; what was
    spent in a month is not. Reading blocks.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        keep_days: float | None,
        repeat_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.lost = 0
        self._keep_days = keep_days
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._file = EntryFile(path, create=create)
        self._file_lock = threading.Lock()  # taken before the other one, where both are
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._shadows: list[Shadow] = []
        self._notes: dict[str, str] = {}
        self._unsaved_lost = 0  # lost, and not yet written down
        self._set_month(clock())
        # What an account spent is always in one of the three.
        self._waiting: AccountSpending = {}
        self._writing: AccountSpending = {}
        self._stored: AccountSpending = {}
        self._failing = False
        self._pruned_at = float("-inf")
        self._wake_event, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        create: bool = True,
        keep_days: float | None = None,
        repeat_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> Ledger:
        ledger = cls(
            Path(path),
            create=create,
            keep_days=keep_days,
            repeat_seconds=repeat_seconds,
            clock=clock,
        )
        try:
            ledger._stored = ledger._file.spent_since(month_of(clock()))
        except BaseException:
            ledger._file.close()
            raise
        return ledger

    def note(self, entry: Entry) -> None:
        """Takes microseconds; from any thread."""
        cost = dollars(entry.cost_usd)
        with self._lock:
            self._entries.append(entry)
            if cost:
                key = (self._month_at(entry.time), entry.account)
                self._waiting[key] = self._waiting.get(key, NOTHING).plus(Spent(cost, cost))
        self._wake()

    def record_shadow(
        self,
        namespace: str,
        similarity: float,
        with_score: float,
        without_score: float,
        time: float,
        request_id: str,
    ) -> None:
        shadow = Shadow(time, request_id, namespace, similarity, with_score, without_score)
        with self._lock:
            self._shadows.append(shadow)
        self._wake()

    def set_gate(self, namespace: str, state: str) -> None:
        """Keeps a gate's state, a JSON text, as rows are kept: without waiting."""
        self._set_note(GATE + namespace, state)

    def gate(self, namespace: str) -> str | None:
        return self._note(GATE + namespace)

    def set_repeat(self, key: str, example: str) -> None:
        """Record the id of the stored answer to the request with this `exact_key`. Does not
        block."""
        self._set_note(REPEAT + key, f"{self._clock()} {example}")

    def repeat(self, key: str) -> tuple[float, str] | None:
        """Return the time of the answer and its id; None after `repeat_seconds`. Blocks."""
        moment, _, example = (self._note(REPEAT + key) or "0 ").partition(" ")
        then = float(moment)
        return (then, example) if then > self._clock() - self._repeat_seconds else None

    def delete_old_repeats(self) -> int:
        """Delete records older than `repeat_seconds`. Return their number."""
        with self._file_lock:
            return self._file.forget_notes(REPEAT, self._clock() - self._repeat_seconds)

    def set_master(self, route: str) -> None:
        """The tier that savings compare the others with."""
        self._set_note(MASTER, route)

    def master(self) -> str | None:
        return self._note(MASTER)

    def total_lost(self) -> int:
        """Rows that any process lost and could say so."""
        return int(self._note(LOST) or 0)

    def spent_this_month(self, account: str, /) -> float:
        """US dollars, from memory: this process's to the last request, others' as last written."""
        return self._spent(account).usd

    def dearest_this_month(self, account: str, /) -> float:
        return self._spent(account).dearest

    def read(self, sql: str, *values: Value) -> list[Row]:
        """For reports, over a connection of its own: the writer does not wait for them."""
        file = EntryFile(self.path, create=False)
        try:
            return file.read(sql, *values)
        finally:
            file.close()

    def flush(self) -> None:
        """Writes what waits. Raises `StoreError`; what could not be written goes on waiting."""
        with self._file_lock:
            batch = self._take()
            if batch.is_empty:
                return
            try:
                self._file.write(batch)
            except BaseException:
                self._restore(batch)
                raise
            with self._lock:
                self._stored = _merged(self._stored, self._writing)
                self._writing = {}
            stored = self._file.spent_since(month_of(self._clock()))
            with self._lock:
                self._stored = stored

    def prune(self, keep_days: float) -> int:
        """Forgets entries and shadows that are older; how many."""
        before, gone = self._clock() - keep_days * DAY, 0
        while not self._stop.is_set():
            with self._file_lock:
                some = self._file.prune(before)
            if not some:
                break
            gone += some
        return gone

    def close(self) -> None:
        """Writes what waits. What cannot be written is logged and lost."""
        self._stop.set()
        self._wake_event.set()
        if self._thread is not None:
            self._thread.join()
        if not self._succeeds(self.flush):
            with self._lock:
                self.lost += len(self._entries) + len(self._shadows)
            log.error("%d rows could not be written to %s: lost", self.lost, self.path.name)
        with self._file_lock:
            self._file.close()

    def _spent(self, account: str) -> Spent:
        with self._lock:
            key = (self._month_at(self._clock()), account)
            spent = self._stored.get(key, NOTHING)
            for purse in (self._writing, self._waiting):
                if key in purse:
                    spent = spent.plus(purse[key])
            return spent

    def _month_at(self, moment: float) -> str:
        if not self._month_begins <= moment < self._month_ends:
            self._set_month(moment)
        return self._month

    def _set_month(self, moment: float) -> None:
        self._month = month_of(moment)
        self._month_begins, self._month_ends = month_bounds(moment)

    def _set_note(self, name: str, value: str) -> None:
        with self._lock:
            self._notes[name] = value
        self._wake()

    def _note(self, name: str) -> str | None:
        with self._file_lock:  # nothing is on its way to the file
            with self._lock:
                if name in self._notes:
                    return self._notes[name]
            rows = self._file.read("SELECT value FROM notes WHERE name = ?", name)
            return str(rows[0][0]) if rows else None

    def _wake(self) -> None:
        if not self._wake_event.is_set():
            self._wake_event.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._write_loop, name="bottega-ledger", daemon=True
                )
                self._thread.start()

    def _write_loop(self) -> None:
        while not self._stop.is_set():
            self._wake_event.wait()
            self._stop.wait(FLUSH_SECONDS)  # what comes together is written together
            self._wake_event.clear()
            if not (self._succeeds(self.flush) and self._succeeds(self._prune_hourly)):
                self._stop.wait(RETRY_SECONDS)
                self._wake_event.set()

    def _succeeds(self, work: Callable[[], None]) -> bool:
        """Whether it could be done; a failure is logged once, not with every attempt."""
        try:
            work()
        except BottegaError as error:
            if not self._failing:
                log.error("the ledger cannot be written, requests go on: %s", error)
            self._failing = True
            return False
        if self._failing:
            log.warning("the ledger is written again; %d rows were lost", self.lost)
        self._failing = False
        return True

    def _prune_hourly(self) -> None:
        now = time.monotonic()
        if now - self._pruned_at <= PRUNE_SECONDS:
            return
        self._pruned_at = now
        if self._repeat_seconds:
            self.delete_old_repeats()
        if self._keep_days is not None:
            self.prune(self._keep_days)

    def _take(self) -> Batch:
        with self._lock:
            self._writing = self._waiting
            batch = Batch(
                self._entries, self._shadows, self._notes, self._waiting, self._unsaved_lost
            )
            self._entries, self._shadows = [], []
            self._notes, self._waiting, self._unsaved_lost = {}, {}, 0
            return batch

    def _restore(self, batch: Batch) -> None:
        with self._lock:
            entries, shadows = [*batch.entries, *self._entries], [*batch.shadows, *self._shadows]
            lost = max(0, len(entries) - MAX_WAITING) + max(0, len(shadows) - MAX_WAITING)
            self._entries, self._shadows = entries[-MAX_WAITING:], shadows[-MAX_WAITING:]
            self._notes = {**batch.notes, **self._notes}
            self._waiting = _merged(batch.spent, self._waiting)
            self._writing = {}
            self._unsaved_lost += batch.lost + lost
            self.lost += lost


def _merged(one: Mapping[AccountMonth, Spent], other: AccountSpending) -> AccountSpending:
    both = dict(one)
    for key, spent in other.items():
        both[key] = both.get(key, NOTHING).plus(spent)
    return both
