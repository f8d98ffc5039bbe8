"""Shadow samples in Python use: the recorder that asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from bottega.errors import SettingError
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.reranking import GatedReranker
from bottega.routing import ShadowSampler
from bottega.types import Candidate, Query, Trace


class ShadowRecorder:
    """A recorder that lets `shadow` measure some of the answers of the apprentice, the first tier
    of the pipeline, against the master, the last one.

    It is awaited, so a measured answer comes later by the slowest of its other calls. What these
    cost is told to `charge`, such as that of `BudgetRouter`, if the pipeline has prices.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        shadow: ShadowSampler,
        *,
        charge: Callable[[float], None] | None = None,
    ) -> None:
        if len(pipeline.tiers) < 2:
            raise SettingError(
                "the pipeline has no apprentice and master to compare",
                hint="give it tiers=(apprentice, master)",
            )
        gated = pipeline.rerank
        # What would have been shown is measured where the gate hides it, too.
        open = (
            replace(pipeline, rerank=gated.rerank) if isinstance(gated, GatedReranker) else pipeline
        )
        self._pipeline = open
        self._shadow = shadow
        self._charge = charge

    async def __call__(self, trace: Trace, /) -> None:
        apprentice, master = self._pipeline.tiers[0], self._pipeline.tiers[-1]
        if trace.tier != apprentice.name or not self._shadow.begins():
            return
        try:
            would_show = await self._pipeline.demonstrations(trace.query, apprentice)
        except BaseException:
            self._shadow.cancel()
            raise
        if not would_show:
            self._shadow.cancel()
            return
        was_shown = bool(trace.candidates)
        await self._shadow.measure(
            trace.query,
            would_show,
            shown=self._said(trace) if was_shown else self._asks(trace, apprentice, would_show),
            hidden=self._asks(trace, apprentice, ()) if was_shown else self._said(trace),
            master=self._asks(trace, master, ()),
        )

    def _said(self, trace: Trace) -> Callable[[], Awaitable[str]]:
        async def said() -> str:
            return trace.answer.text

        return said

    def _asks(
        self, trace: Trace, tier: Tier, shown: Sequence[Candidate]
    ) -> Callable[[], Awaitable[str]]:
        return lambda: self._ask(trace.query, tier, shown)

    async def _ask(self, query: Query, tier: Tier, shown: Sequence[Candidate]) -> str:
        asked = self._pipeline
        prompt = (tier.prompt or asked.prompt)(query, shown)
        reply = await tier.generator.generate(prompt, tier.sampling or asked.sampling)
        cost = asked.price(reply.model, reply.usage) if asked.price else None
        if self._charge is not None and cost is not None:
            self._charge(cost)
        return asked.choose([asked.parse(query, one) for one in reply.completions]).text
