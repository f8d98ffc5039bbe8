"""What was shown, and what that saved."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from bottega.types import Trace


class Counted(Protocol):
    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None: ...


class CountUses:
    """Tells a knowledge base which of its examples were shown. A cheaper tier's answer saved what
    the master's have cost on average until then, less its own cost; nothing as long as a price is
    not known."""

    def __init__(self, knowledge: Counted, *, master: str) -> None:
        self._knowledge = knowledge
        self._master = master
        self._spent = 0.0
        self._priced = 0

    async def __call__(self, trace: Trace, /) -> None:
        if trace.tier == self._master:
            if trace.cost_usd is not None:
                self._spent, self._priced = self._spent + trace.cost_usd, self._priced + 1
            saved = 0.0
        else:
            saved = self._saved(trace.cost_usd)
        shown = [c.example.id for c in trace.candidates if c.example.id is not None]
        if shown:
            await asyncio.to_thread(self._knowledge.used, shown, saved)

    def _saved(self, cost: float | None) -> float:
        if cost is None or not self._priced:
            return 0.0
        return max(0.0, self._spent / self._priced - cost)
