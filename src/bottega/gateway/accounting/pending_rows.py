"""Ledger rows that wait in memory to be written, and the spending that includes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from bottega.gateway.accounting.database import AccountMonth, Entry, LedgerBatch, ShadowSample

MAX_PENDING = 100_000
WriteCallback = Callable[[BaseException | None], None]
"""Called with the error of a write, or with None after its commit."""


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
