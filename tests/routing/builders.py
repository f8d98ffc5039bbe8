"""Tiers without calls, and traces with given costs."""

from __future__ import annotations

from bottega.generation import ScriptedGenerator
from bottega.protocols import Tier
from bottega.types import Answer, Candidate, Example, Prompt, Query, Reply, Trace

QUERY = Query("q")
TIERS = tuple(Tier(name, ScriptedGenerator([])) for name in ("small", "middle", "large"))
TWO = (TIERS[0], TIERS[2])


def near(score: float) -> list[Candidate]:
    """What a retriever finds whose nearest example has this score; the nearest last."""
    example = Example(QUERY, "a")
    return [Candidate(example, score - 0.5), Candidate(example, score)]


def traced(
    tier: Tier, cost: float | None, *, dismissed: tuple[Reply, ...] = (), query: Query = QUERY
) -> Trace:
    reply = Reply("model", ())
    return Trace(
        "id", 0.0, query, tier.name, (), Prompt(()), reply, Answer("a"), 0.1, cost, dismissed
    )
