"""The model that always answers."""

from __future__ import annotations

from bottega.protocols import Router, Tier
from bottega.types import Query


def always(tier: Tier) -> Router:
    async def route(query: Query, /) -> Tier:
        return tier

    return route
