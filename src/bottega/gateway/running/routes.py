"""[route] as a router, and as what sends an answer's question on."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.gateway.config.settings import Route
from bottega.protocols import Escalation, Retriever, Router, Tier
from bottega.routing import Budgeted, Covered, Unsure, always, coin, cold_start


def routed(
    route: Route, tiers: Sequence[Tier], retrieve: Retriever, held: int
) -> tuple[Router, Escalation | None]:
    """Objects of one namespace: what one tenant asks changes no other's routes. `held` examples
    are in its cache already, and warm start so far."""
    router, escalation = _router(route, tiers, retrieve), None
    if route.by == "confidence":
        assert route.below is not None
        escalation = Unsure(tiers, route.below)
    left = route.cold_start - held
    return cold_start(left, tiers[-1], then=router) if left > 0 else router, escalation


def _router(route: Route, tiers: Sequence[Tier], retrieve: Retriever) -> Router:
    match route.by:
        case "coin":
            return coin(tiers, route.master_rate or 0.0, route.seed)
        case "budget":
            assert route.usd_per_1k is not None
            return Budgeted(tiers, route.usd_per_1k, seed=route.seed)
        case "coverage":
            return Covered(
                tiers,
                retrieve,
                at_least=route.at_least,
                master_rate=route.master_rate,
                seed=route.seed,
            )
    named = (tier for tier in tiers if tier.name == route.tier)
    return always(next(named, tiers[0]))
