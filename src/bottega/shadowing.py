"""Recorder that measures the benefit of demonstrations on some answers of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bottega.errors import SettingError
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.reranking import GatedReranker
from bottega.routing import ShadowSampler
from bottega.types import Candidate, Query, Trace


class ShadowRecorder:
    """Recorder that lets `shadow` compare some answers of the apprentice, the pipeline's first
    tier, with and without demonstrations, against the master, the last tier.

    It is awaited, so a measured answer is delayed by the slowest of its other calls. `charge`, such
    as that of `BudgetRouter`, is called with their costs if the pipeline has prices.
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
                f"the pipeline must have an apprentice and a master, got {len(pipeline.tiers)}"
                " tiers",
                hint="pass tiers=(apprentice, master)",
            )
        gate = pipeline.rerank
        # Demonstrations that the gate hides are measured, too.
        ungated = replace(pipeline, rerank=gate.rerank) if isinstance(gate, GatedReranker) else None
        self._pipeline = ungated or pipeline
        self._shadow = shadow
        self._charge = charge

    async def __call__(self, trace: Trace, /) -> None:
        apprentice, master = self._pipeline.tiers[0], self._pipeline.tiers[-1]
        if trace.tier != apprentice.name or not self._shadow.begins():
            return
        try:
            shown = await self._pipeline.demonstrations(trace.query, apprentice)
        except BaseException:
            self._shadow.cancel()
            raise
        if not shown:
            self._shadow.cancel()
            return

        async def given() -> str:
            return trace.answer.text

        await self._shadow.measure(
            trace.query,
            shown,
            shown=given if trace.candidates else lambda: self._ask(trace.query, apprentice, shown),
            hidden=(lambda: self._ask(trace.query, apprentice, ())) if trace.candidates else given,
            master=lambda: self._ask(trace.query, master, ()),
            was_shown=bool(trace.candidates),
        )

    async def _ask(self, query: Query, tier: Tier, shown: Sequence[Candidate]) -> str:
        pipeline = self._pipeline
        found = await pipeline.generate(query, tier, shown)
        cost = pipeline.price(found.reply.model, found.reply.usage) if pipeline.price else None
        if self._charge is not None and cost is not None:
            self._charge(cost)
        return found.answer.text
