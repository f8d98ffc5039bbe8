"""Time as it passes, and without the wait for a core that other work on the machine causes."""

from __future__ import annotations

import time
from pathlib import Path

SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux


def clocks() -> tuple[float, float]:
    """Seconds, and seconds without those in which this thread was ready but had no core: where
    other work runs, a synchronisation ends with that wait, of up to a tick of the scheduler."""
    waited = 0.0
    if SCHEDULED.exists():
        waited = int(SCHEDULED.read_text().split()[1]) / 1e9
    now = time.perf_counter()
    return now, now - waited


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, awake = clocks()
    return wall - start[0], awake - start[1]
