"""Routers that ignore the question."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from bottega.errors import SettingError
from bottega.protocols import Recorder, Router, Tier
from bottega.types import Query, Trace


def apprentice_and_master(tiers: Sequence[Tier]) -> tuple[Tier, Tier]:
    """Return the first tier (the cheapest) and the last one (the most expensive)."""
    check_tiers(tiers)
    return tiers[0], tiers[-1]


def check_tiers(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """Return the tiers. Raise `SettingError` for fewer than two or for duplicate names."""
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names) or len(names) < 2:
        raise SettingError(
            f"tiers must be two or more with different names, got {names}",
            hint="pass at least two tiers with different names, the cheapest first",
        )
    return tuple(tiers)


def check_fraction(name: str, value: float) -> float:
    """Return the value. Raise `SettingError` unless it is between 0 and 1; NaN is not."""
    if not 0 <= value <= 1:
        raise SettingError(
            f"{name} must be between 0 and 1, got {value}", hint=f"set {name} between 0 and 1"
        )
    return value


class FixedRouter:
    """Router that sends every query to one tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def __call__(self, query: Query, /) -> Tier:
        return self._tier


class ColdStartRouter:
    """Router that sends the first `n` queries to the master and all others through `then`.

    The cold start of Cache-of-Thought: the cache is filled before the apprentice uses it. Traces
    and costs are passed on to `then`.
    """

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
        """Pass the trace on to `then` if it has a method `observe`."""
        learn: Recorder | None = getattr(self._then, "observe", None)
        if learn is not None:
            await learn(trace)

    def charge(self, usd: float) -> None:
        """Pass the cost on to `then` if it has a method `charge`."""
        spend: Callable[[float], None] | None = getattr(self._then, "charge", None)
        if spend is not None:
            spend(usd)


class RandomRouter:
    """Router that samples a tier for each query, seeded, in the order of the queries.

    `master_rate` is the last tier's probability, and the other tiers share the rest equally; or it
    is one probability for each tier, with the sum 1. Raises `SettingError`.
    """

    def __init__(
        self, tiers: Sequence[Tier], master_rate: float | Sequence[float], seed: int = 0
    ) -> None:
        self._tiers = tiers
        self._shares = _shares(len(tiers), master_rate)
        self._rng = random.Random(seed)

    async def __call__(self, query: Query, /) -> Tier:
        return self._rng.choices(self._tiers, self._shares)[0]


def _shares(tiers: int, master_rate: float | Sequence[float]) -> list[float]:
    if isinstance(master_rate, int | float):
        others = max(1, tiers - 1)
        shares = [(1 - master_rate) / others] * (tiers - 1) + [float(master_rate)]
    else:
        shares = list(master_rate)
    valid = len(shares) == tiers and all(0 <= share <= 1 for share in shares)
    if not valid or not math.isclose(sum(shares), 1):
        raise SettingError(
            f"master_rate must be a probability, or one for each of {tiers} tiers, got"
            f" {master_rate}",
            hint="set it between 0 and 1, or pass one probability for each tier with the sum 1",
        )
    return shares
