"""Routers that do not look at the question."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from bottega.errors import SettingError
from bottega.protocols import Recorder, Router, Tier
from bottega.types import Query, Trace


def ends(tiers: Sequence[Tier]) -> tuple[Tier, Tier]:
    """The apprentice and the master: the cheapest tier and the dearest."""
    checked(tiers)
    return tiers[0], tiers[-1]


def checked(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names) or len(names) < 2:
        raise SettingError(
            f"the tiers are {names}",
            hint="give at least two tiers of different names, the cheapest first",
        )
    return tuple(tiers)


def share(name: str, value: float) -> float:
    if not 0 <= value <= 1:  # NaN is refused, too
        raise SettingError(f"{name} is {value}", hint=f"set {name} between 0 and 1")
    return value


def always(tier: Tier) -> Router:
    async def route(query: Query, /) -> Tier:
        return tier

    return route


def cold_start(n: int, master: Tier, then: Router) -> ColdStartRouter:
    """Sends the first `n` queries to the master, all others where `then` sends them: an empty
    cache is filled before anybody is shown anything of it (Cache-of-Thought's cold start)."""
    return ColdStartRouter(n, master, then)


class ColdStartRouter:
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


def coin(tiers: Sequence[Tier], master_rate: float | Sequence[float], seed: int = 0) -> Router:
    """Draws a tier for each query, by the seed and in the order in which they come.

    `master_rate` is the last tier's probability, the others share the rest alike; or one
    probability for each tier, which sum to 1. Raises `SettingError`.
    """
    shares = _shares(len(tiers), master_rate)
    draw = random.Random(seed)

    async def route(query: Query, /) -> Tier:
        return draw.choices(tiers, shares)[0]

    return route


def _shares(tiers: int, master_rate: float | Sequence[float]) -> list[float]:
    if isinstance(master_rate, int | float):
        others = max(1, tiers - 1)
        shares = [(1 - master_rate) / others] * (tiers - 1) + [float(master_rate)]
    else:
        shares = list(master_rate)
    fit = len(shares) == tiers and all(0 <= share <= 1 for share in shares)
    if not fit or not math.isclose(sum(shares), 1):
        raise SettingError(
            f"a coin cannot choose among {tiers} tiers by {master_rate}",
            hint="give the master's share from 0 to 1, or one share for each tier with the sum 1",
        )
    return shares
