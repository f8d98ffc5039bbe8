"""Work after an answer: stored example, trace, ledger entry, metrics and log line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bottega._util.identity import identity
from bottega._util.tracing import span
from bottega.errors import BottegaError
from bottega.gateway.accounting.access import Access
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry
from bottega.gateway.ports import SEARCHED, RequestRecord
from bottega.gateway.request.bill import Bill, TokenEstimates
from bottega.gateway.request.jobs import ChatJob, ChatResult, TenantQuery, request_prompt
from bottega.gateway.state.shared import SharedState
from bottega.gateway.telemetry.logs import WarningLogger, log_request
from bottega.gateway.telemetry.metrics import Metrics
from bottega.openai_api.request import ChatRequest
from bottega.parsing import strip_thinking
from bottega.protocols import Pricer, Recorder
from bottega.recording.recorders import is_unanswered
from bottega.types import Answer, Example, Reply, Trace


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


@dataclass(frozen=True)
class RequestRecorder:
    """Recorder of requests that have ended: ledger entry, metrics and log line. With a shared
    `state`, replies wait until their entry is durable."""

    ledger: Ledger
    metrics: Metrics
    access: Access
    state: SharedState | None = None

    def __call__(self, record: RequestRecord) -> None:
        entry = record.entry()
        self._add_entry(record, entry)
        self.metrics.observe(entry)
        log_request(
            entry,
            record.reason,
            record.fallback,
            record.client_request_id,
            record.trace_id,
            record.route_reason,
        )
        if record.entered:
            self.access.leave(record.account)

    async def commit(self, record: RequestRecord) -> None:
        """Add the ledger entry of a reply and wait until it is durable, before the reply ends."""
        assert self.state is not None
        self._add_entry(record, record.entry())
        await self.state.commit(record)

    def _add_entry(self, record: RequestRecord, entry: Entry) -> None:
        """Add the entry to the ledger, once."""
        if record.in_ledger:
            return
        record.in_ledger = True
        self.ledger.record(entry)
        if record.reservation is not None:  # after the entry: the cost must always count somewhere
            record.reservation.release()
