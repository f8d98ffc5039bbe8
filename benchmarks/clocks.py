"""Elapsed time, and elapsed time without waits for a core."""

from __future__ import annotations

import time
from pathlib import Path

SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux


def clocks() -> tuple[float, float]:
    """Return seconds, and seconds without those in which this thread was ready but had no core. On
    a busy machine a synchronization ends with such a wait, of up to a scheduler tick.
    """
    waited = 0.0
    if SCHEDULED.exists():
        waited = int(SCHEDULED.read_text().split()[1]) / 1e9
    now = time.perf_counter()
    return now, now - waited


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, awake = clocks()
    return wall - start[0], awake - start[1]
