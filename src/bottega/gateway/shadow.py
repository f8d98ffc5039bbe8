"""Shadow calls, which compare answers with and without demonstrations, and with the master's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bottega.errors import BottegaError, GenerationError
from bottega.gateway.accounting.limiter import BudgetError
from bottega.gateway.completion import ChatJob, ChatResult, Completer, TenantQuery
from bottega.gateway.demonstrations import fitting
from bottega.gateway.endpoint import RequestRecord
from bottega.gateway.finalization import Finalizer
from bottega.gateway.ports import Pair, Served, UpstreamCall
from bottega.gateway.response_cache.memory import CachedReply, ReplyCache, is_repeatable
from bottega.openai_api.response import ChatCompletion
from bottega.types import Candidate

log = logging.getLogger(__name__)


@dataclass
class ShadowRunner:
    """Background measurement of the benefit of demonstrations. `over` is called with the record of
    every call that only measures, `measured` with every comparison. A teacher's answer replaces the
    apprentice's in `repeats`. No client waits for it."""

    completer: Completer
    finalizer: Finalizer
    over: Callable[[RequestRecord], None]
    measured: Callable[[RequestRecord, float, Pair], None]
    repeats: ReplyCache | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def after(self, job: ChatJob, result: ChatResult) -> None:
        """Start a measurement after some answers of an apprentice."""
        query = job.query
        if query is None or query.tenant.shadow is None:
            return
        own = self._apprentice_answer(job, query, result)
        if own is not None and query.tenant.shadow.begins():
            task = asyncio.create_task(self._measure(job, query, result, *own))
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
        if not (job.overrides.retrieve and job.overrides.tier is None):
            return None
        for call, completed in (*result.dismissed, (result.call, result.completed)):
            reply = self.completer.without_extras(job, call, completed)
            learns = call.served.name not in query.tenant.teachers
            if learns and call.served.tier.shots > 0 and _is_complete(reply):
                return call, reply.completions[0].text
        return None

    async def _measure(
        self, job: ChatJob, query: TenantQuery, result: ChatResult, call: UpstreamCall, answer: str
    ) -> None:
        tenant, served = query.tenant, call.served
        assert tenant.shadow is not None
        found: list[Candidate] = []
        try:
            found = list(call.shown) or await self._ungated(job, query, served)
        except BottegaError as error:
            log.info("request %s is not measured: %s", job.record.request_id, error)
        if not found:
            tenant.shadow.cancel()
            return
        expensive_first = self.completer.served[::-1]
        teachers = (one for one in expensive_first if one.name in tenant.teachers)
        master = next(teachers, expensive_first[0])
        master_answer = _master_answer(master, result)

        async def ask(served: Served, shown: Sequence[Candidate]) -> str:
            return await self._ask(job, served, shown)

        pair = await tenant.shadow.measure(
            query.query,
            found,
            shown=lambda: _given(answer) if call.shown else ask(served, found),
            hidden=lambda: ask(served, ()) if call.shown else _given(answer),
            master=lambda: ask(master, ()) if master_answer is None else _given(master_answer),
        )
        if pair is not None:
            self.measured(job.record, max(one.score for one in found), pair)

    async def _ungated(self, job: ChatJob, query: TenantQuery, served: Served) -> list[Candidate]:
        """Return the demonstrations that the gate hides."""
        pipeline = query.tenant.ungated or query.pipeline
        found = await pipeline.demonstrations(query.query, served.tier)
        return fitting(found, job.request, served.capabilities)

    async def _ask(self, job: ChatJob, served: Served, shown: Sequence[Candidate]) -> str:
        """Return an answer that no client waits for, with a ledger entry of its own."""
        record = RequestRecord(job.record.request_id, account=job.record.account)
        record.namespace, record.state = job.record.namespace, "shadow"
        record.route, record.shots = served.name, len(shown)
        record.hold = job.record.hold and job.record.hold.sibling()
        # Without a query nothing is stored: only the master's own reply may be.
        query, bill = None if shown else job.query, self.finalizer.bill(record, job.request)
        own = replace(job, query=query, bill=bill)
        body = await self.completer.augmented(job.request, shown)
        try:
            call = UpstreamCall(served, body, tuple(shown))
            result = await self.completer.call_upstream(own, call)
            await self.finalizer.store(own, result)
            self._correct(own, result)
            if record.cost_usd and job.query and job.query.tenant.charge:
                job.query.tenant.charge(record.cost_usd)
            return result.completed.completions[0].text
        except BudgetError as error:
            record.status = error.status
            raise GenerationError(str(error), hint=error.hint) from error
        except BottegaError:
            record.status = 502
            raise
        finally:
            self.over(record)

    def _correct(self, job: ChatJob, result: ChatResult) -> None:
        """Replace the apprentice's cached reply with the teacher's."""
        name, completed = result.call.served.name, result.completed
        if job.query is None or job.key is None or name not in job.query.tenant.teachers:
            return
        if self.repeats is not None and is_repeatable(completed.completions):
            reply = CachedReply(completed.payload, name, completed.model)
            self.repeats.replace(job.key, reply)


async def _given(answer: str) -> str:
    return answer


def _master_answer(master: Served, result: ChatResult) -> str | None:
    """Return the master's answer if the request already has one without demonstrations."""
    call, completed = result.call, result.completed
    is_it = call.served.name == master.name and not call.shown and _is_complete(completed)
    return completed.completions[0].text if is_it else None


def _is_complete(completed: ChatCompletion) -> bool:
    choices = completed.completions
    return len(choices) == 1 and choices[0].finish_reason == "stop" and bool(choices[0].text)
