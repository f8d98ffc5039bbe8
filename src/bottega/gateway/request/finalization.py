"""Work after an answer: cost, stored example, trace, and shadow calls for measurements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bottega._util.identity import identity
from bottega._util.tracing import span
from bottega.errors import BottegaError, GenerationError
from bottega.gateway.accounting.limiter import AccountBudgetError, TokenEstimates
from bottega.gateway.judging import judge_request, read_verdict
from bottega.gateway.ports import SEARCHED, RequestRecord, ServedTier, UpstreamCall
from bottega.gateway.request.calls import Bill, fitting
from bottega.gateway.request.completion import Completer
from bottega.gateway.request.jobs import ChatJob, ChatResult, TenantQuery
from bottega.gateway.request.request_prompts import request_prompt
from bottega.gateway.state.response_cache import CachedReply, ReplyCache, is_repeatable
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.openai_api.request import ChatRequest
from bottega.openai_api.response import ChatCompletion
from bottega.parsing import strip_thinking
from bottega.protocols import Pricer, Recorder
from bottega.recording.recorders import is_unanswered
from bottega.routing import AgreementPair
from bottega.types import Answer, Candidate, Example, Reply, Trace


@dataclass(frozen=True)
class Finalizer:
    """Finalizer of answered requests. `remember` is called with the `exact_key` of a request whose
    complete reply was stored, and the id of the stored example. `failures` returns the recorder of
    a namespace for requests that tiers failed to answer: a pipeline records answers only."""

    price: Pricer
    warn: WarningLogger = field(default_factory=WarningLogger)
    estimates: TokenEstimates = field(default_factory=TokenEstimates)
    remember: Callable[[str, str], None] = lambda key, example: None
    failures: Callable[[str], Recorder] | None = None

    def bill(self, record: RequestRecord, request: ChatRequest) -> Bill:
        return Bill(record, request, self.price, self.estimates)

    async def __call__(self, job: ChatJob, result: ChatResult) -> None:
        """Store the answer and record the trace. Never raises: the client has its answer, or is
        about to get it."""
        await self.store(job, result)
        job.record.dismissed_usd = sum(call.cost_usd or 0.0 for call, _ in result.dismissed)
        query = job.query
        if query is not None and query.pipeline.record is not None:
            try:
                trace = _trace(job, query, result)
                with span("record"):
                    await query.pipeline.record(trace)
            except BottegaError as error:
                self.warn("not recorded", error)

    async def failed(self, job: ChatJob) -> None:
        """Record the trace of a request that tiers failed to answer."""
        if job.record.tier_errors and job.query is not None and self.failures is not None:
            await self.failures(job.record.namespace)(_failed_trace(job, job.query))

    async def store(self, job: ChatJob, result: ChatResult) -> None:
        """Store the reply as an example if it may become one. Never raises: routers must observe
        the cost of an answer even if the disk is full."""
        record = job.record
        record.model = result.completed.model
        if job.query is None:
            return
        try:
            record.stored = await self._stored(job, job.query, result)
            text = result.completed.completions[0].text
            # A repeat serves the stored answer, so it must be the whole text that this client gets.
            if record.stored and job.key and strip_thinking(text) == text.strip():
                self.remember(job.key, record.stored)
        except BottegaError as error:
            self.warn("not stored", error)

    async def _stored(self, job: ChatJob, query: TenantQuery, result: ChatResult) -> str | None:
        """Store the complete answer of a stored tier to a question that needs no earlier turns;
        return the example's id."""
        tenant, completions = query.tenant, result.completed.completions
        answer = strip_thinking(completions[0].text)  # reasoning is neither shown nor searched
        can_store = (
            job.record.account.can_store
            and job.overrides.store
            and job.request.is_single_turn
            and result.call.served.name in tenant.stored_tiers
            and len(completions) == 1
            and completions[0].finish_reason == "stop"
            and not is_unanswered(answer)
            and tenant.can_embed(query.query)
        )
        if tenant.writer is None or not can_store:
            return None
        tags = {"context": query.query.context, "request": job.record.request_id}
        if job.record.account.id:
            tags["account"] = job.record.account.id
        source = f"{result.call.served.name}:{result.completed.model}"
        example = Example(
            query.query, answer, rationale=result.call.rationale, tags=tags, source=source
        )
        with span("store"):
            stored = await tenant.writer.store(example)
        if stored is None:
            self.warn("not remembered")
        return stored if stored == identity(example) else None  # a pinned answer has another id


def _trace(job: ChatJob, query: TenantQuery, result: ChatResult) -> Trace:
    call, completed, record = result.call, result.completed, job.record
    # Compressed passages are not in the prompt.
    shown = call.shown if call.compression is None else ()
    answer = query.pipeline.parse_reply(query.query, completed.completions)
    return Trace(
        id=record.request_id,
        time=record.begun,
        query=query.query,
        tier=call.served.name,
        candidates=call.shown,
        prompt=call.prompt or request_prompt(job.request, query.images, shown),
        reply=completed.reply,
        answer=replace(answer, rationale=call.rationale or answer.rationale),
        seconds=record.seconds,
        cost_usd=record.cost_usd,
        dismissed=tuple(one.reply for _, one in result.dismissed),
        tree=call.tree,
        compression=call.compression,
        reason=_reason(record),
    )


def _failed_trace(job: ChatJob, query: TenantQuery) -> Trace:
    record = job.record
    return Trace(
        id=record.request_id,
        time=record.begun,
        query=query.query,
        tier=record.route,
        candidates=(),
        prompt=request_prompt(job.request, query.images, ()),
        reply=Reply(record.model, ()),
        answer=Answer("", valid=False),
        seconds=record.seconds,
        cost_usd=record.cost_usd,
        reason=_reason(record),
    )


def _reason(record: RequestRecord) -> str:
    """Return the reason for the tier, why its search had no result, and the errors of tiers."""
    failure = "" if record.search in ("", SEARCHED) else f"no search result: {record.search}"
    return "; ".join(filter(None, (record.route_reason, failure, *record.tier_errors)))


log = logging.getLogger(__name__)


@dataclass
class ShadowRunner:
    """Background measurement of the benefit of demonstrations, and of the agreement of the variants
    of an experiment with the master. `on_end` is called with the record of every call that only
    measures, `measured` with every comparison, the similarity of its nearest demonstration and
    whether the question was drawn at random and the compared answer was served. The answer of a
    stored tier replaces the apprentice's in `repeats`. The tier `judge` compares answers that no
    rule can compare. No client waits for it."""

    completer: Completer
    finalizer: Finalizer
    on_end: Callable[[RequestRecord], None]
    measured: Callable[[RequestRecord, float | None, AgreementPair, bool], None]
    repeats: ReplyCache
    judge: str | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def after(self, job: ChatJob, result: ChatResult) -> None:
        """Start a measurement after some answers of an apprentice."""
        query = job.query
        if query is None or query.tenant.shadow is None:
            return
        own = self._apprentice_answer(job, query, result)
        if own is None:
            return
        drawn = query.tenant.shadow.draw()
        if query.tenant.shadow.begins(drawn):
            sampled = drawn and own[0] is result.call
            measurement = self._measure(job, query, result, *own, sampled)
            task = asyncio.create_task(_in_span("shadow", measurement))
            # The event loop holds its tasks by weak references only.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _apprentice_answer(
        self, job: ChatJob, query: TenantQuery, result: ChatResult
    ) -> tuple[UpstreamCall, str] | None:
        """Return the call and the answer of an apprentice, also if it was dismissed: otherwise a
        gate that hides useful demonstrations would never learn of them."""
        if not (job.record.variant or _is_comparable(job)):
            return None
        for call, completed in ((result.call, result.completed), *result.dismissed):
            reply = self.completer.without_extras(job, call, completed)
            is_apprentice = call.served.name not in query.tenant.stored_tiers
            if is_apprentice and _is_complete(reply):
                return call, reply.completions[0].text
        return None

    async def _measure(
        self,
        job: ChatJob,
        query: TenantQuery,
        result: ChatResult,
        call: UpstreamCall,
        answer: str,
        sampled: bool,
    ) -> None:
        """Compare an answer with and without demonstrations. An answer without candidates is
        compared only if it was `sampled`: the reported agreement includes such answers."""
        tenant, served = query.tenant, call.served
        assert tenant.shadow is not None
        found: list[Candidate] = []
        try:
            found = list(call.shown) if _is_comparable(job) else []
            if not found and _is_comparable(job):  # the gate hides them
                pipeline = tenant.ungated or query.pipeline
                with self.completer.drafts(job):
                    hidden = await pipeline.demonstrations(query.query, served.tier)
                found = fitting(hidden, job.request, served.capabilities)
        except BottegaError as error:
            log.info("request %s is not measured: %s", job.record.request_id, error)
        if not (found or sampled):
            tenant.shadow.cancel()
            return
        expensive_first = self.completer.served[::-1]
        stored_tiers = (one for one in expensive_first if one.name in tenant.stored_tiers)
        master = next(stored_tiers, expensive_first[0])
        # The request may have the master's answer without demonstrations already.
        own, completed = result.call, result.completed
        is_masters = own.served.name == master.name and not own.shown and _is_complete(completed)
        master_answer = completed.completions[0].text if is_masters else None

        ask = partial(self._ask, job)
        pair = await tenant.shadow.measure(
            query.query,
            found,
            shown=lambda: ask(served, found) if found and not call.shown else _given(answer),
            hidden=lambda: ask(served, ()) if found and call.shown else _given(answer),
            master=lambda: ask(master, ()) if master_answer is None else _given(master_answer),
            was_shown=bool(call.shown),
            judge=None if self.judge is None else partial(self._verdict, job),
        )
        if pair is not None:
            similarity = max((one.score for one in found), default=None)
            self.measured(job.record, similarity, pair, sampled)

    async def _ask(self, job: ChatJob, served: ServedTier, shown: Sequence[Candidate]) -> str:
        """Return an answer that no client waits for."""
        # Without a query nothing is stored: only the master's own reply may be.
        query = None if shown else job.query
        body = await self.completer.augmented(job.request, shown)
        own = replace(job, query=query, bill=self._bill(job, job.request, served, len(shown)))
        completed = await self._call(job, own, UpstreamCall(served, body, tuple(shown)))
        is_stored = query is not None and served.name in query.tenant.stored_tiers
        if own.key and is_stored and is_repeatable(completed.completions):
            reply = CachedReply(completed.payload, served.name, completed.model)
            self.repeats.replace(own.key, reply)
        return completed.completions[0].text

    async def _verdict(self, job: ChatJob, one: str, other: str) -> float | None:
        """Return the judge's verdict on two answers, None without a clear one."""
        served = next(tier for tier in self.completer.served if tier.name == self.judge)
        texts = strip_thinking(one), strip_thinking(other)
        request = judge_request(job.request.question, *texts)
        own = replace(job, request=request, query=None, key=None)
        own.bill = self._bill(job, request, served, 0)
        try:
            completed = await self._call(job, own, UpstreamCall(served, request.body))
        except BottegaError as error:
            self.finalizer.warn("no verdict", error)
            return None
        if (verdict := read_verdict(completed.completions[0].text)) is None:
            self.finalizer.warn("unclear verdict")
        return verdict

    def _bill(self, job: ChatJob, request: ChatRequest, served: ServedTier, shots: int) -> Bill:
        """Return the bill of a call with a ledger entry of its own."""
        record = RequestRecord(job.record.request_id, account=job.record.account)
        record.namespace, record.state = job.record.namespace, "shadow"
        record.route, record.shots = served.name, shots
        # The client's request may end first and release its own reservation.
        record.reservation = job.record.reservation and job.record.reservation.sibling()
        return self.finalizer.bill(record, request)

    async def _call(self, job: ChatJob, own: ChatJob, call: UpstreamCall) -> ChatCompletion:
        """Call the tier and record the call in the ledger entry of `own`. Raises
        `GenerationError`."""
        record = own.record
        try:
            result = await self.completer.call_upstream(own, call)
            await self.finalizer.store(own, result)
            if record.cost_usd and job.query and job.query.tenant.charge:
                job.query.tenant.charge(record.cost_usd)
            return result.completed
        except AccountBudgetError as error:
            record.status = error.status
            raise GenerationError(str(error), hint=error.hint) from error
        except BottegaError:
            record.status = 502
            raise
        finally:
            # Also after a cancellation: the ledger must get what the call has cost.
            self.on_end(record)


def _is_comparable(job: ChatJob) -> bool:
    """Return whether the answer can be repeated with and without demonstrations: no option of the
    request selects the tier or disables retrieval."""
    return job.overrides.retrieve and job.overrides.tier is None


async def _in_span(name: str, work: Awaitable[None]) -> None:
    with span(name):
        await work


async def _given(answer: str) -> str:
    return answer


def _is_complete(completed: ChatCompletion) -> bool:
    choices = completed.completions
    return len(choices) == 1 and choices[0].finish_reason == "stop" and bool(choices[0].text)
