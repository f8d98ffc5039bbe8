from __future__ import annotations

import pytest

from bottega.errors import StoreError
from bottega.recording import CompositeRecorder
from bottega.types import Trace
from tests.recording.test_traces import trace


async def test_recorders_are_called_in_order() -> None:
    received: list[str] = []

    async def first(trace: Trace, /) -> None:
        received.append(f"first {trace.id}")

    async def second(trace: Trace, /) -> None:
        received.append("second")

    await CompositeRecorder(first, None, second)(trace())
    assert received == ["first abc123", "second"]


async def test_a_failed_recorder_does_not_stop_the_others() -> None:
    received: list[str] = []

    async def fails(trace: Trace, /) -> None:
        raise StoreError("no space")

    async def works(trace: Trace, /) -> None:
        received.append(trace.id)

    with pytest.raises(StoreError, match="no space"):
        await CompositeRecorder(fails, works)(trace())
    assert received == ["abc123"]
