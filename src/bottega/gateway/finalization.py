"""Finalization of answered requests: cost, stored example, recorded trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bottega.errors import BottegaError
from bottega.gateway.accounting.limiter import TokenEstimates
from bottega.gateway.billing import Bill, dismissed_usd
from bottega.gateway.completion import ChatJob, ChatResult, TenantQuery
from bottega.gateway.demonstrations import answer_text
from bottega.gateway.endpoint import RequestRecord
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.image import Image
from bottega.knowledge.records import identity
from bottega.openai_api.request import (
    INSTRUCTION_ROLES,
    ChatMessage,
    ChatRequest,
    ImagePart,
    TextPart,
)
from bottega.openai_api.response import ChatCompletion
from bottega.parsing import strip_thinking
from bottega.protocols import Pricer
from bottega.types import Candidate, Example, Message, Prompt, Reply, Trace, Usage


@dataclass(frozen=True)
class Finalizer:
    """Finalizer of answered requests. `remember` is called with the `exact_key` of a request whose
    complete reply was stored, and the id of the stored example."""

    price: Pricer
    warn: WarningLogger = field(default_factory=WarningLogger)
    estimates: TokenEstimates = field(default_factory=TokenEstimates)
    remember: Callable[[str, str], None] = lambda key, example: None

    def bill(self, record: RequestRecord, request: ChatRequest) -> Bill:
        return Bill(record, request, self.price, self.estimates)

    async def __call__(self, job: ChatJob, result: ChatResult) -> None:
        """Store the answer and record the trace. Never raises: the client has its answer, or is
        about to get it."""
        await self.store(job, result)
        job.record.dismissed_usd = dismissed_usd(call for call, _ in result.dismissed)
        query = job.query
        if query is None or query.pipeline.record is None:
            return
        try:
            await query.pipeline.record(_trace(job, query, result))
        except BottegaError as error:
            self.warn("not recorded", error)

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
            if record.stored and job.key and strip_thinking(text) == text.strip():
                self.remember(job.key, record.stored)
        except BottegaError as error:
            self.warn("not stored", error)

    async def _stored(self, job: ChatJob, query: TenantQuery, result: ChatResult) -> str | None:
        """Store a teacher's complete answer to a question that needs no earlier turns; return the
        example's id."""
        tenant, completions = query.tenant, result.completed.completions
        answer = strip_thinking(completions[0].text)  # reasoning is neither shown nor searched
        can_store = (
            job.record.account.can_store
            and job.overrides.store
            and job.request.is_single_turn
            and result.call.served.name in tenant.teachers
            and len(completions) == 1
            and completions[0].finish_reason == "stop"
            and answer
        )
        if tenant.keeper is None or not can_store:
            return None
        tags = {"context": query.query.context, "request": job.record.request_id}
        if job.record.account.id:
            tags["account"] = job.record.account.id
        source = f"{result.call.served.name}:{result.completed.model}"
        example = Example(query.query, answer, tags=tags, source=source)
        stored = await tenant.keeper.keep(example)
        if stored is None:
            self.warn("not remembered")
        return stored if stored == identity(example) else None  # a pinned answer has another id


def _trace(job: ChatJob, query: TenantQuery, result: ChatResult) -> Trace:
    call, completed, record = result.call, result.completed, job.record
    return Trace(
        id=record.request_id,
        time=record.begun,
        query=query.query,
        tier=call.served.name,
        candidates=call.shown,
        prompt=call.prompt or _prompt(job.request, query, call.shown),
        reply=_reply(completed),
        answer=query.pipeline.parse_reply(query.query, completed.completions),
        seconds=record.seconds,
        cost_usd=record.cost_usd,
        dismissed=tuple(_reply(one) for _, one in result.dismissed),
    )


def _reply(completed: ChatCompletion) -> Reply:
    return Reply(completed.model, completed.completions, completed.usage or Usage())


def _prompt(request: ChatRequest, query: TenantQuery, shown: Sequence[Candidate]) -> Prompt:
    """Return the request with its demonstrations as a prompt."""
    messages = [_message(message, query) for message in request.messages]
    turns = [turn for one in shown for turn in _turns(one.example, request.text_first)]
    count = request.instruction_count
    return Prompt((*messages[:count], *turns, *messages[count:]))


def _turns(example: Example, text_first: bool) -> tuple[Message, Message]:
    images, text = example.query.images, example.query.text
    user = Message("user", (text, *images) if text_first else (*images, text))
    return user, Message("assistant", (answer_text(example),))


def _message(message: ChatMessage, query: TenantQuery) -> Message:
    parts: list[str | Image] = []
    for part in message.parts or ():
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, ImagePart):
            parts.append(query.images[part.url])
    if message.role in INSTRUCTION_ROLES:
        return Message("system", tuple(parts))
    return Message("assistant" if message.role == "assistant" else "user", tuple(parts))
