"""Who answers: the tier that was chosen, with what it is shown; another one if it cannot."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Literal, TypeVar

import orjson

from bottega.errors import (
    BottegaError,
    EmptyKnowledgeBaseError,
    GenerationError,
    RejectedError,
    SettingError,
)
from bottega.gateway.accounting.limiter import BudgetError
from bottega.gateway.billing import Bill
from bottega.gateway.decode_budget import DecodeBudget
from bottega.gateway.demonstrations import DataUrl, augmented, fitting, prompted
from bottega.gateway.endpoint import shield_for
from bottega.gateway.errors import MisconfiguredError, unsupported_request
from bottega.gateway.overrides import Overrides
from bottega.gateway.ports import Body, Call, Served, Tenant
from bottega.gateway.requests import Chat, Part, parts_of
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.image import Image
from bottega.openai_api.client import track_call
from bottega.openai_api.errors import ApiError
from bottega.openai_api.response import ChatCompletion
from bottega.pipeline import Pipeline
from bottega.protocols import Prompter
from bottega.types import Candidate, Query

log = logging.getLogger(__name__)

# Why there is no question to be routed; None: the cache could not be opened.
CHEAP = (None, "background")

# Which tiers may answer for one that failed: all, dearer ones, none.
Fallback = Literal["any", "up", "never"]

Failure = TypeVar("Failure", bound=BottegaError)
TOO_LONG = re.compile(r"(?i)context[ _](length|window|size)")


@dataclass(slots=True)
class Asked:
    """One request. Without a `question`, the client's body is forwarded unchanged; without a `key`,
    the reply is not repeated. `may_use_master`: whether a request without a question may reach the
    master."""

    chat: Chat
    overrides: Overrides
    bill: Bill
    question: Question | None = None
    key: str | None = None
    may_use_master: bool = True


@dataclass(slots=True)
class Question:
    """What examples are found for, and where. `pictures` are all images of the request by URL."""

    query: Query
    tenant: Tenant
    pictures: Mapping[str, Image]

    @property
    def pipeline(self) -> Pipeline:
        return self.tenant.pipeline


@dataclass(slots=True)
class Answered:
    """`dismissed` are the replies of tiers that were asked first and were not sure enough, `failed`
    the tiers that were to answer and could not."""

    call: Call
    completed: ChatCompletion
    dismissed: tuple[tuple[Call, ChatCompletion], ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class Streaming:
    """Stream of a reply that has begun; `events` includes the first event. `started` is the
    `perf_counter` time at which the upstream call started."""

    call: Call
    events: AsyncGenerator[bytes]
    started: float
    failed: tuple[str, ...] = ()


@dataclass
class Answering:
    """`served` are the tiers, cheapest first. An upstream call whose client has left may take
    another `finish_seconds`: it is paid for in any case, and its reply reports the usage."""

    served: Sequence[Served]
    data_url: DataUrl
    random: random.Random = field(default_factory=random.Random)
    warn: WarningLogger = field(default_factory=WarningLogger)
    fallback: Fallback = "any"
    decoding: DecodeBudget = field(default_factory=DecodeBudget)
    finish_seconds: float = 60.0

    async def complete(self, asked: Asked) -> Answered:
        """Return the routed tier's answer, or that of a fallback. Raises the last tier's
        `GenerationError` if all fail, `SettingError` if a tier does not support the request, or
        `BudgetError` if the key's budget does not allow it."""
        waiting = await self._in_turn(asked)
        dismissed: list[tuple[Call, ChatCompletion]] = []
        failed: list[str] = []
        failure: BottegaError | None = None
        while waiting:
            call = await self._call(asked, waiting.pop(0))
            try:
                completed = await self.call_upstream(asked, call)
            except BudgetError as error:
                failure = error
                break
            except (GenerationError, SettingError) as error:
                failure = _named(error, call)
                if asked.bill.record.has_left():
                    raise asyncio.CancelledError from error  # no client: ask no other tier
                if bare := _without(asked, call, error):
                    asked, waiting = bare, [call.served, *waiting]
                    continue
                failed.append(call.served.name)
                if not (waiting or dismissed) or _is_the_clients(error):
                    break
                self._fell_back(call, error)
                continue
            better = await self._better(asked, call, completed)
            if better is not None and call.abandoned:
                raise asyncio.CancelledError  # no client: do not escalate
            if better is None:
                completed = self.as_asked(asked, call, completed)
                return Answered(call, completed, tuple(dismissed), tuple(failed))
            dismissed.append((call, completed))
            waiting = [better, *(one for one in waiting if one is not better)]
        # A dismissed answer is better than no answer.
        if dismissed and (self.fallback == "any" or isinstance(failure, BudgetError)):
            call, completed = dismissed.pop()
            completed = self.as_asked(asked, call, completed)
            return Answered(call, completed, tuple(dismissed), tuple(failed))
        assert failure is not None
        raise failure

    async def call_upstream(self, asked: Asked, call: Call) -> ChatCompletion:
        """Reserve the cost of the call, make it and book its cost. Raises `BudgetError` and the
        errors of the upstream."""
        asked.bill.reserve(call)
        # A free call has no cost to learn: cancel it when its client leaves.
        seconds = 0.0 if asked.bill.is_free(call) else self.finish_seconds
        has_left = asked.bill.record.has_left
        try:
            with track_call() as state:
                work = call.served.upstream.complete(call.body)
                completed = await shield_for(work, seconds, has_left, state.idle)
        except asyncio.CancelledError:
            if state.is_waiting:
                asked.bill.failed()
            else:
                asked.bill.cut_off(call, perf_counter() - state.started)
            raise
        except BaseException:
            asked.bill.failed()
            raise
        call.abandoned = has_left()
        asked.bill.paid(call, completed.usage, perf_counter() - state.started)
        return completed

    async def stream(self, asked: Asked) -> Streaming:
        """Another tier is asked as long as nothing has come."""
        waiting = await self._in_turn(asked)
        failed: list[str] = []
        while True:
            call = await self._call(asked, waiting.pop(0))
            asked.bill.reserve(call)
            events = call.served.upstream.stream(call.body)
            try:
                with track_call() as state:
                    first = await anext(events)
            except StopAsyncIteration:
                asked.bill.failed()
                raise ApiError(
                    "the model's stream was empty", status=502, type="server_error"
                ) from None
            except asyncio.CancelledError:
                if state.is_waiting:
                    asked.bill.failed()
                else:
                    asked.bill.cut_off(call, perf_counter() - state.started)
                raise
            except (GenerationError, SettingError) as error:
                asked.bill.failed()
                if bare := _without(asked, call, error):
                    asked, waiting = bare, [call.served, *waiting]
                    continue
                if not waiting or _is_the_clients(error):
                    _named(error, call)
                    raise
                failed.append(call.served.name)
                self._fell_back(call, error)
                continue
            return Streaming(call, _from(first, events), state.started, tuple(failed))

    def may_go_on(self, asked: Asked) -> bool:
        """Whether an answer has to be whole before it is known that it is the one."""
        return self._escalates(asked) and any(one.asks for one in self.served)

    def _fell_back(self, call: Call, error: BottegaError) -> None:
        """What another tier answers may cost more than was planned: the operator must see it."""
        name = call.served.name
        self.warn(f"{name} failed, another tier asked", error)
        log.warning("%s failed, another tier is asked: %s", name, error)

    async def _in_turn(self, asked: Asked) -> list[Served]:
        """The chosen tier, then dearer ones, then cheaper ones; a tier that was named is the only
        one. Raises `ApiError` if none can take the request."""
        chosen, named = await self._chosen(asked)
        place = next(i for i, one in enumerate(self.served) if one.name == chosen)
        others = [*self.served[place + 1 :], *reversed(self.served[:place])]
        order = [self.served[place], *([] if named else others)]
        able = [one for one in order if asked.chat.needs.met_by(one.capabilities)]
        if able:
            return [able[0], *(one for one in able[1:] if self._may_follow(asked, able[0], one))]
        raise unsupported_request(
            asked.chat.needs, [one.capabilities for one in order], chosen if named else ""
        )

    def _may_follow(self, asked: Asked, failed: Served, other: Served) -> bool:
        # A client can make a tier fail, so a fallback must not reach the master either.
        if asked.question is None and not asked.may_use_master and other is self.served[-1]:
            return False
        place = self.served.index
        return self.fallback == "any" or (self.fallback == "up" and place(other) > place(failed))

    async def _chosen(self, asked: Asked) -> tuple[str, bool]:
        overrides, question = asked.overrides, asked.question
        if overrides.tier is not None:
            return overrides.tier, True
        if overrides.master_rate is not None:
            lucky = self.random.random() < overrides.master_rate
            return self.served[-1 if lucky else 0].name, False
        if question is None:
            # Clients control which requests pass, so the tiers of the key apply here, too.
            cheap = asked.chat.passes in CHEAP or not asked.may_use_master
            return self.served[0 if cheap else -1].name, False
        try:
            return (await question.pipeline.route(question.query)).name, False
        except ApiError:
            raise
        except BottegaError as error:
            self.warn("no tier chosen, the cheapest asked", error)
            return self.served[0].name, False

    async def _call(self, asked: Asked, served: Served) -> Call:
        shown = await self._shown(asked, served)
        if served.prompt is not None:
            return await self._prompted(asked, served, shown, served.prompt)
        if not shown:
            return Call(served, self._asking(asked, served, asked.chat.body))
        kept = fitting(shown, asked.chat, served.capabilities)
        body = await self.augmented(asked.chat, kept)
        return Call(served, self._asking(asked, served, body), tuple(kept))

    async def augmented(self, chat: Chat, shown: Sequence[Candidate]) -> Body:
        """Return the body with the demonstrations; encode their images off the event loop."""
        images = [image for one in shown for image in one.example.query.images]
        if not images:
            return augmented(chat, shown, self.data_url)
        encoded = partial(asyncio.to_thread, augmented, chat, shown, self.data_url)
        return await self.decoding.run(images, encoded, Image.wire_cost)

    async def _prompted(
        self, asked: Asked, served: Served, shown: Sequence[Candidate], prompter: Prompter
    ) -> Call:
        if asked.question is None:
            raise ApiError(
                "the pipeline served here cannot answer this request:"
                f" {asked.chat.passes or 'it has no question'}",
                code="unsupported",
                hint="end with a user turn of text and images, without tools or audio",
            )
        kept = fitting(shown, asked.chat, served.capabilities)
        prompt = prompter(_last_turn(asked.chat, asked.question.query), kept)
        images = [part for one in prompt.messages for part in one.parts if isinstance(part, Image)]
        encoded = partial(asyncio.to_thread, prompted, asked.chat, prompt, self.data_url)
        body = await self.decoding.run(images, encoded, Image.wire_cost)
        return Call(served, self._asking(asked, served, body), tuple(kept), prompt)

    def _asking(self, asked: Asked, served: Served, body: Body) -> Body:
        wanted = served.asks and self._escalates(asked)
        return {**body, **served.asks} if wanted else body

    async def _shown(self, asked: Asked, served: Served) -> list[Candidate]:
        """An answer without examples is better than none."""
        question = asked.question
        if question is None or not asked.overrides.retrieve:
            return []
        tier = served.tier
        if asked.overrides.shots is not None and tier.shots:
            tier = replace(tier, shots=asked.overrides.shots)
        try:
            return await question.pipeline.demonstrations(question.query, tier)
        except EmptyKnowledgeBaseError:
            return []
        except ApiError:
            raise
        except BottegaError as error:
            self.warn("no demonstrations", error)
            return []

    async def _better(self, asked: Asked, call: Call, completed: ChatCompletion) -> Served | None:
        question = asked.question
        if question is None or not self._escalates(asked):
            return None
        pipeline, query = question.pipeline, question.query
        assert pipeline.escalate is not None
        answer = pipeline.choose([pipeline.parse(query, one) for one in completed.completions])
        tier = await pipeline.escalate(query, call.served.tier, answer)
        found = [one for one in self.served if tier is not None and one.name == tier.name]
        return next((one for one in found if asked.chat.needs.met_by(one.capabilities)), None)

    def as_asked(self, asked: Asked, call: Call, completed: ChatCompletion) -> ChatCompletion:
        """One choice of several, without the log-probabilities that only the gateway wanted."""
        question = asked.question
        if question is None or not (call.served.asks and self._escalates(asked)):
            return completed
        pipeline = question.pipeline
        answers = [pipeline.parse(question.query, one) for one in completed.completions]
        said = pipeline.choose(answers).text
        chosen = next((i for i, one in enumerate(answers) if one.text == said), 0)
        reply = orjson.loads(completed.payload)
        choice = {**reply["choices"][chosen], "index": 0}
        if not asked.chat.body.get("logprobs"):
            choice.pop("logprobs", None)
        payload = orjson.dumps({**reply, "choices": [choice]})
        one = completed.completions[chosen]
        return ChatCompletion(payload, completed.model, (one,), completed.usage)

    def _escalates(self, asked: Asked) -> bool:
        return (
            asked.question is not None
            and asked.question.pipeline.escalate is not None
            and asked.overrides.tier is None
            and asked.chat.body.get("n") in (None, 1)
        )


def _last_turn(chat: Chat, query: Query) -> Query:
    """Return the query without the images of earlier turns, which stay in those turns."""
    messages = chat.body["messages"]
    assert isinstance(messages, list)
    images = sum(isinstance(part, Part) for part in parts_of(messages[-1]))
    return replace(query, images=query.images[len(query.images) - images :])


def _named(error: Failure, call: Call) -> Failure:
    if isinstance(error, MisconfiguredError):
        error.tier = call.served.name
    return error


def _is_the_clients(error: BottegaError) -> bool:
    """Another tier would refuse it as well, unless it is only too long for this one."""
    return _refuses(error) and not TOO_LONG.search(str(error))


def _refuses(error: BottegaError) -> bool:
    return isinstance(error, RejectedError) and not isinstance(error, MisconfiguredError)


def _without(asked: Asked, call: Call, error: BottegaError) -> Asked | None:
    """The request alone, where it may be what was shown with it that is refused: too long, too many
    images, or against some policy."""
    if not (call.shown and _refuses(error)):
        return None
    log.warning("%s refuses, it is asked without demonstrations: %s", call.served.name, error)
    return replace(asked, overrides=replace(asked.overrides, retrieve=False))


async def _from(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()
