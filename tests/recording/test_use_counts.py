from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from bottega.recording import UseCountRecorder
from tests.recording.test_traces import trace


class IndexedRows:
    def __init__(self) -> None:
        self.received: list[tuple[list[str], float]] = []

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None:
        self.received.append((list(ids), saved_usd))


async def test_demonstrations_save_the_masters_mean_cost() -> None:
    indexed_rows = IndexedRows()
    count = UseCountRecorder(indexed_rows, master="master")
    small = replace(trace(cost=0.1), tier="apprentice")
    await count(small)
    for cost in (2.0, None, 4.0):
        await count(replace(trace(cost=cost), candidates=()))
    await count(small)
    await count(replace(small, cost_usd=None))
    await count(replace(small, cost_usd=9.0))
    assert [ids for ids, _ in indexed_rows.received] == [["e7", "e8"]] * 4
    assert [saved for _, saved in indexed_rows.received] == pytest.approx([0, 2.9, 0, 0])
