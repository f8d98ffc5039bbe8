"""Routes that heed nothing of the question."""

from __future__ import annotations

from collections.abc import Callable

from bottega.protocols import Recorder, Router, Tier
from bottega.types import Query, Trace


def always(tier: Tier) -> Router:
    async def route(query: Query, /) -> Tier:
        return tier

    return route


def cold_start(n: int, master: Tier, then: Router) -> ColdStart:
    """Sends the first `n` queries to the master, all others where `then` sends them: an empty
    cache is filled before anybody is shown anything of it (Cache-of-Thought's cold start)."""
    return ColdStart(n, master, then)


class ColdStart:
    """What it is told of answers and of costs it passes on to the router behind it."""

    def __init__(self, n: int, master: Tier, then: Router) -> None:
        self._left = n
        self._master = master
        self._then = then

    async def __call__(self, query: Query, /) -> Tier:
        if self._left > 0:
            self._left -= 1
            return self._master
        return await self._then(query)

    async def observe(self, trace: Trace, /) -> None:
        learn: Recorder | None = getattr(self._then, "observe", None)
        if learn is not None:
            await learn(trace)

    def charge(self, usd: float) -> None:
        spend: Callable[[float], None] | None = getattr(self._then, "charge", None)
        if spend is not None:
            spend(usd)
