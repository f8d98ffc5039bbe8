from __future__ import annotations

from bottega.generation import ScriptedGenerator
from bottega.pipeline import FixedRouter
from bottega.protocols import Router, Tier
from bottega.routing import ColdStartRouter
from bottega.types import Answer as Said
from bottega.types import Completion, Prompt, Query, Reply, Trace

MODEL = ScriptedGenerator([])
SMALL, LARGE = Tier("small", MODEL), Tier("large", MODEL)


class Adaptive:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, query: Query, /) -> Tier:
        return SMALL

    async def observe(self, trace: Trace, /) -> None:
        self.seen.append(trace.id)


async def names(route: Router, n: int) -> list[str]:
    return [(await route(Query(f"q{i}"))).name for i in range(n)]


async def test_a_fixed_router_returns_its_tier() -> None:
    assert await names(FixedRouter(LARGE), 3) == ["large"] * 3


async def test_a_cold_start_uses_the_master_first() -> None:
    route = ColdStartRouter(2, LARGE, then=FixedRouter(SMALL))
    assert await names(route, 4) == ["large", "large", "small", "small"]


async def test_a_cold_start_passes_traces_on() -> None:
    adaptive = Adaptive()
    reply = Reply("m", (Completion("a"),))
    trace = Trace("t1", 0.0, Query("q"), "large", (), Prompt(()), reply, Said("a"), 0.1)
    await ColdStartRouter(2, LARGE, then=adaptive).observe(trace)
    await ColdStartRouter(2, LARGE, then=FixedRouter(SMALL)).observe(trace)
    assert adaptive.seen == ["t1"]


async def test_a_cold_start_passes_costs_on() -> None:
    spent: list[float] = []
    adaptive = Adaptive()
    adaptive.charge = spent.append  # type: ignore[attr-defined]
    ColdStartRouter(2, LARGE, then=adaptive).charge(0.5)
    ColdStartRouter(2, LARGE, then=FixedRouter(SMALL)).charge(0.5)
    assert spent == [0.5]
