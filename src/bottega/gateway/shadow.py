"""Behind some answers of an apprentice: what it says with demonstrations and without, and what the
master says, so that the benefit is measured and not assumed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bottega.errors import BottegaError, GenerationError
from bottega.gateway.accounting.limiter import BudgetError
from bottega.gateway.completion import Answered, Answering, Asked, Question
from bottega.gateway.demonstrations import fitting
from bottega.gateway.endpoint import RequestRecord
from bottega.gateway.finalization import Finalizer
from bottega.gateway.ports import Call, Pair, Served
from bottega.gateway.response_cache.memory import Remembered, Repeats, may_be_repeated
from bottega.openai_api.response import ChatCompletion
from bottega.types import Candidate

log = logging.getLogger(__name__)


@dataclass
class ShadowRunner:
    """`over` is told of every call that only measures, as of a request of its own; `measured` of
    every comparison. A teacher's answer replaces the apprentice's in `repeats`. Runs in the
    background: no client waits for it."""

    answering: Answering
    settle: Finalizer
    over: Callable[[RequestRecord], None]
    measured: Callable[[RequestRecord, float, Pair], None]
    repeats: Repeats | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def after(self, record: RequestRecord, asked: Asked, answered: Answered) -> None:
        question = asked.question
        if question is None or question.tenant.shadow is None:
            return
        own = self._own(asked, question, answered)
        if own is not None and question.tenant.shadow.begins():
            call, said = own
            task = asyncio.create_task(self._measure(record, asked, question, answered, call, said))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, asked: Asked, question: Question, answered: Answered) -> tuple[Call, str] | None:
        """What an apprentice said, also where it was not sure enough and another one answered: a
        gate that hides what would have made it sure would else never learn of that."""
        if not (asked.overrides.retrieve and asked.overrides.tier is None):
            return None
        for call, completed in (*answered.dismissed, (answered.call, answered.completed)):
            said = self.answering.as_asked(asked, call, completed)
            learns = call.served.name not in question.tenant.teachers
            if learns and call.served.tier.shots > 0 and _is_whole(said):
                return call, said.completions[0].text
        return None

    async def _measure(
        self,
        record: RequestRecord,
        asked: Asked,
        question: Question,
        answered: Answered,
        call: Call,
        said: str,
    ) -> None:
        tenant, served = question.tenant, call.served
        assert tenant.shadow is not None
        found: list[Candidate] = []
        try:
            found = list(call.shown) or await self._candidates(asked, question, served)
        except BottegaError as error:
            log.info("request %s is not measured: %s", record.request_id, error)
        if not found:
            tenant.shadow.cancel()
            return
        dearest = self.answering.served[::-1]
        master = next((one for one in dearest if one.name in tenant.teachers), dearest[0])
        known = _said_by(master, answered)

        async def answer(served: Served, shown: Sequence[Candidate]) -> str:
            return await self._ask(record, asked, served, shown)

        pair = await tenant.shadow.measure(
            question.query,
            found,
            shown=lambda: _told(said) if call.shown else answer(served, found),
            hidden=lambda: answer(served, ()) if call.shown else _told(said),
            master=lambda: answer(master, ()) if known is None else _told(known),
        )
        if pair is not None:
            self.measured(record, max(one.score for one in found), pair)

    async def _candidates(
        self, asked: Asked, question: Question, served: Served
    ) -> list[Candidate]:
        """What would have been shown if the gate had let it pass."""
        pipeline = question.tenant.ungated or question.pipeline
        found = await pipeline.demonstrations(question.query, served.tier)
        return fitting(found, asked.chat, served.capabilities)

    async def _ask(
        self, record: RequestRecord, asked: Asked, served: Served, shown: Sequence[Candidate]
    ) -> str:
        own = RequestRecord(record.request_id, account=record.account)
        own.namespace, own.state, own.route = record.namespace, "shadow", served.name
        own.shots = len(shown)
        own.hold = record.hold and record.hold.sibling()
        # Without a question nothing is stored: only the master's own reply may be.
        alone = replace(
            asked,
            question=None if shown else asked.question,
            bill=self.settle.bill(own, asked.chat),
        )
        body = await self.answering.augmented(asked.chat, shown)
        call = Call(served, body, tuple(shown))
        try:
            completed = await self.answering.call_upstream(alone, call)
            await self.settle.alone(own, alone, call, completed)
            self._correct(alone, call, completed)
            if own.cost_usd and asked.question and asked.question.tenant.charge:
                asked.question.tenant.charge(own.cost_usd)
            return completed.completions[0].text
        except BudgetError as error:
            own.status = error.status
            raise GenerationError(str(error), hint=error.hint) from error
        except BottegaError:
            own.status = 502
            raise
        finally:
            self.over(own)

    def _correct(self, asked: Asked, call: Call, completed: ChatCompletion) -> None:
        """Replace the apprentice's cached reply with the teacher's."""
        question, name = asked.question, call.served.name
        if question is None or asked.key is None or name not in question.tenant.teachers:
            return
        if self.repeats is not None and may_be_repeated(completed.completions):
            reply = Remembered(completed.payload, name, completed.model)
            self.repeats.replace(asked.key, reply)


async def _told(said: str) -> str:
    return said


def _said_by(master: Served, answered: Answered) -> str | None:
    """What the master has answered already, as it would if it were asked for the comparison."""
    call, completed = answered.call, answered.completed
    is_it = call.served.name == master.name and not call.shown and _is_whole(completed)
    return completed.completions[0].text if is_it else None


def _is_whole(completed: ChatCompletion) -> bool:
    choices = completed.completions
    return len(choices) == 1 and choices[0].finish_reason == "stop" and bool(choices[0].text)
