"""After an answer: what it cost, what is kept of it, who is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bottega.errors import BottegaError
from bottega.gateway.accounting.limiter import TokenEstimates
from bottega.gateway.billing import Bill, dismissed_usd
from bottega.gateway.completion import Answered, Asked, Question
from bottega.gateway.demonstrations import worked
from bottega.gateway.endpoint import RequestRecord
from bottega.gateway.ports import Call
from bottega.gateway.requests import INSTRUCTING, Chat, parts_of
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.image import Image
from bottega.knowledge.records import identity
from bottega.openai_api.response import ChatCompletion
from bottega.parsing import spoken
from bottega.protocols import Pricer
from bottega.types import Candidate, Example, Message, Prompt, Reply, Trace, Usage


@dataclass(frozen=True)
class Finalizer:
    """Settlement of answered requests. `remember` is called with the `exact_key` of a request whose
    complete reply was stored, and the id of the stored example."""

    price: Pricer
    warn: WarningLogger = field(default_factory=WarningLogger)
    estimates: TokenEstimates = field(default_factory=TokenEstimates)
    remember: Callable[[str, str], None] = lambda key, example: None

    def bill(self, record: RequestRecord, chat: Chat) -> Bill:
        return Bill(record, chat, self.price, self.estimates)

    async def __call__(self, record: RequestRecord, asked: Asked, answered: Answered) -> None:
        """Never raises: the client has its answer, or is about to get it."""
        call, completed = answered.call, answered.completed
        record.model = completed.model
        record.dismissed_usd = dismissed_usd(call for call, _ in answered.dismissed)
        if asked.question is None:
            return
        await self._kept(record, asked, asked.question, call, completed)
        if asked.question.pipeline.record is None:
            return
        try:
            await asked.question.pipeline.record(_trace(record, asked, asked.question, answered))
        except BottegaError as error:
            self.warn("not recorded", error)

    async def alone(
        self, record: RequestRecord, asked: Asked, call: Call, completed: ChatCompletion
    ) -> None:
        """Store the reply of a call that no client waits for; routers do not observe it. Never
        raises."""
        record.model = completed.model
        if asked.question is not None:
            await self._kept(record, asked, asked.question, call, completed)

    async def _kept(
        self,
        record: RequestRecord,
        asked: Asked,
        question: Question,
        call: Call,
        completed: ChatCompletion,
    ) -> None:
        """A full disk keeps no router from hearing what an answer has cost."""
        try:
            record.stored = await self._keep(record, asked, question, call, completed)
            first = completed.completions[0].text
            if record.stored and asked.key and spoken(first) == first.strip():
                self.remember(asked.key, record.stored)
        except BottegaError as error:
            self.warn("not stored", error)

    async def _keep(
        self,
        record: RequestRecord,
        asked: Asked,
        question: Question,
        call: Call,
        completed: ChatCompletion,
    ) -> str | None:
        """Only what a teacher said to its end, to a question that stands for itself."""
        tenant, first = question.tenant, completed.completions[0]
        said = spoken(first.text)  # what was thought before is neither shown nor searched
        may = (
            tenant.keeper is not None
            and record.account.may_store
            and asked.overrides.store
            and asked.chat.single_turn
            and call.served.name in tenant.teachers
            and len(completed.completions) == 1
            and first.finish_reason == "stop"
            and said
        )
        if not may or tenant.keeper is None:
            return None
        tags = {"context": asked.chat.context, "request": record.request_id}
        if record.account.id:
            tags["account"] = record.account.id
        source = f"{call.served.name}:{completed.model}"
        example = Example(question.query, said, tags=tags, source=source)
        stored = await tenant.keeper.keep(example)
        if stored is None:
            self.warn("not remembered")
        return stored if stored == identity(example) else None  # else a pinned answer stays


def _trace(record: RequestRecord, asked: Asked, question: Question, answered: Answered) -> Trace:
    pipeline, completed = question.pipeline, answered.completed
    answers = [pipeline.parse(question.query, one) for one in completed.completions]
    return Trace(
        id=record.request_id,
        time=record.begun,
        query=question.query,
        tier=answered.call.served.name,
        candidates=answered.call.shown,
        prompt=answered.call.prompt or _prompt(asked, question, answered.call.shown),
        reply=_reply(completed),
        answer=pipeline.choose(answers),
        seconds=record.seconds,
        cost_usd=record.cost_usd,
        dismissed=tuple(_reply(one) for _, one in answered.dismissed),
    )


def _reply(completed: ChatCompletion) -> Reply:
    return Reply(completed.model, completed.completions, completed.usage or Usage())


def _prompt(asked: Asked, question: Question, shown: Sequence[Candidate]) -> Prompt:
    """What the tier was shown, as other prompts are recorded."""
    messages = asked.chat.body["messages"]
    assert isinstance(messages, list)
    told = [_message(message, question) for message in messages]
    turns = [turn for one in shown for turn in _turns(one.example, asked.chat.text_first)]
    before = asked.chat.before
    return Prompt((*told[:before], *turns, *told[before:]))


def _turns(example: Example, text_first: bool) -> tuple[Message, Message]:
    images, text = example.query.images, example.query.text
    asked = Message("user", (text, *images) if text_first else (*images, text))
    return asked, Message("assistant", (worked(example),))


def _message(message: dict[str, object], question: Question) -> Message:
    parts: list[str | Image] = []
    for part in parts_of(message):
        parts.append(part if isinstance(part, str) else question.pictures[part.url])
    if message.get("role") in INSTRUCTING:
        return Message("system", tuple(parts))
    return Message("assistant" if message.get("role") == "assistant" else "user", tuple(parts))
