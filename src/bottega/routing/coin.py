"""The multiplexer of Cache-of-Thought: a coin that heeds nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.protocols import Router, Tier
from bottega.types import Query


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
