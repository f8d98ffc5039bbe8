"""Several recorders as one."""

from __future__ import annotations

from bottega.protocols import Recorder
from bottega.types import Trace


class Several:
    """Each is told, one after the other, even if one before it failed; then the first failure is
    raised. Without recorders nothing happens."""

    def __init__(self, *recorders: Recorder | None) -> None:
        self._recorders = [recorder for recorder in recorders if recorder is not None]

    async def __call__(self, trace: Trace, /) -> None:
        failures: list[Exception] = []
        for record in self._recorders:
            try:
                await record(trace)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
