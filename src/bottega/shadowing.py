"""Recorders that ask other tiers too: for the benefit of demonstrations, and for agreement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from bottega.errors import GenerationError, SettingError
from bottega.pipeline import Pipeline
from bottega.protocols import Recorder, Tier
from bottega.reranking import GatedReranker
from bottega.routing import ShadowSampler
from bottega.routing.agreement_router import AgreementComparison, AgreementPolicy
from bottega.routing.benefit_gate import CompareAnswers
from bottega.types import Candidate, Query, SearchResult, Trace

log = logging.getLogger(__name__)


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


class AgreementRecorder:
    """Recorder that compares the answers that an `AgreementRouter` or `AgreementEscalation` has
    selected: the master's where the apprentice answered, and the apprentice's where the master did.

    Without it the master answers forever. It is awaited, so a compared answer is delayed by the
    other call; put it before the recorder that stores the master's answers. `same` returns 1.0 for
    the same answer, 0.0 for another and None for an undecided one, which counts as different, as
    does a call that fails. `remember` gets the trace of the master's answer to a compared query.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        policy: AgreementPolicy,
        same: CompareAnswers,
        *,
        remember: Recorder | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._policy = policy
        self._same = same
        self._remember = remember

    async def __call__(self, trace: Trace, /) -> None:
        comparison = self._policy.pending(trace.query)
        if comparison is None:
            return
        different = True if comparison.compared else None
        try:
            if comparison.compared:
                different = await self._differs(trace, comparison)
        except GenerationError as error:
            log.info("a comparison failed and counts as different: %s", error)
        finally:
            self._policy.end(comparison, different)

    async def _differs(self, trace: Trace, comparison: AgreementComparison) -> bool:
        pipeline, query = self._pipeline, trace.query
        apprentice, master = pipeline.tiers[0], pipeline.tiers[-1]
        if trace.tier == apprentice.name:
            found = await pipeline.generate(query, master, ())
            if self._remember is not None:
                await self._remember(self._master_trace(trace, found))
            own, other = trace.answer, found.answer
        elif trace.dismissed:
            own = pipeline.parse_reply(query, trace.dismissed[0].completions)
            other = trace.answer
        else:
            shown = list(comparison.found)
            if pipeline.rerank is not None:
                shown = await pipeline.rerank(query, shown, apprentice.shots)
            found = await pipeline.generate(query, apprentice, shown[: apprentice.shots])
            own, other = found.answer, trace.answer
        if not own.valid:
            return True
        return await asyncio.to_thread(self._same, own.text, other.text, query) != 1.0

    def _master_trace(self, trace: Trace, found: SearchResult) -> Trace:
        """Return the trace of the master's answer to a query that the apprentice answered."""
        price, reply = self._pipeline.price, found.reply
        return replace(
            trace,
            tier=self._pipeline.tiers[-1].name,
            candidates=(),
            prompt=found.prompt,
            reply=reply,
            answer=found.answer,
            cost_usd=None if price is None else price(reply.model, reply.usage),
        )
