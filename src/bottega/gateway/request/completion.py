"""Completion of chat requests: the routed tier with demonstrations, or a fallback on failure."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Generic, Literal, TypeVar, cast

import orjson

from bottega._util.tracing import span
from bottega.errors import (
    BottegaError,
    EmbeddingError,
    EmptyKnowledgeBaseError,
    GenerationError,
    ImageError,
    PromptRejectedError,
    RejectedError,
    SettingError,
)
from bottega.gateway.accounting.access import AccountBudgetError
from bottega.gateway.errors import MisconfiguredError, reason_of, unsupported_request
from bottega.gateway.ports import SEARCHED, PrefixUpstream, ServedTier, TierPassages, UpstreamCall
from bottega.gateway.request.bill import billed_call, shield_for
from bottega.gateway.request.jobs import (
    ChatJob,
    ChatResult,
    ChatStream,
    augmented,
    fitting,
    prompted,
    replayed_chunks,
    without_rationales,
)
from bottega.gateway.request.reading import DecodeBudget
from bottega.gateway.request.reasoning import (
    ReceivedChunks,
    Trim,
    may_reason,
    trim_reply,
    trim_stream,
    with_instruction,
)
from bottega.gateway.request.rejections import (
    Rejections,
    is_content_policy,
    is_too_long,
    named_features,
)
from bottega.gateway.request.request_search import RequestSearch
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import Body, ChatRequest, DataUrl, messages_json
from bottega.openai_api.response import ChatCompletion
from bottega.pipeline import run
from bottega.recipes.rcts import SearchError
from bottega.types import Candidate, Prompt, Query, Reply, Sampling

# Sends a call of the current request and books its cost.
SendDraft = Callable[[UpstreamCall], Awaitable[ChatResult]]
_sender: ContextVar[_Sender] = ContextVar("draft_sender")

log = logging.getLogger(__name__)

# Reasons of bypass for which the cheapest tier is enough; None: the cache cannot be opened.
CHEAP = (None, "background")
# Tiers that may answer for one that failed: all, more expensive ones, none.
Fallback = Literal["any", "up", "never"]

T = TypeVar("T", bound=ChatResult | ChatStream)


@dataclass
class Completer:
    """Completer of chat jobs. `served` are the tiers, cheapest first. An upstream call whose client
    has left may take another `finish_seconds`: it costs the same, and its reply reports the usage.
    """

    served: Sequence[ServedTier]
    data_url: DataUrl
    random: random.Random = field(default_factory=random.Random)
    warn: WarningLogger = field(default_factory=WarningLogger)
    fallback: Fallback = "any"
    decoding: DecodeBudget = field(default_factory=DecodeBudget)
    finish_seconds: float = 60.0
    rejections: Rejections = field(default_factory=Rejections)

    async def complete(self, job: ChatJob) -> ChatResult:
        """Return the routed tier's answer, or that of a fallback. Raises the last tier's
        `GenerationError` if all fail, `SettingError` if a tier does not support the request, or
        `AccountBudgetError` if the key's budget does not allow it."""
        steps = _JobSteps(self, job, self.call_upstream, lambda result: result)
        try:
            with self.drafts(job):
                result, _ = await run(steps)
        except (GenerationError, SettingError, AccountBudgetError) as error:
            # A dismissed answer is better than no answer.
            if not steps.dismissed or not (
                self.fallback == "any" or isinstance(error, AccountBudgetError)
            ):
                raise
            result = steps.dismissed.pop()
            kept = f"kept the answer of {result.call.served.name}: {reason_of(error)}"
            job.record.add_route_reason(kept)
        steps.learn_rejections()
        dismissed = tuple((one.call, one.completed) for one in steps.dismissed)
        completed = self.without_extras(job, result.call, result.completed)
        if result.call.reasons:
            completed, result.call.rationale = _trimmer(job, result.call)(completed)
        return ChatResult(result.call, completed, dismissed, tuple(steps.failed))

    async def stream(self, job: ChatJob) -> ChatStream:
        """Return the stream of the routed tier, or of a fallback: another tier may answer until the
        first content. Raises like `complete`."""
        steps = _JobSteps(self, job, self._open_stream, partial(_stream_of, job))
        with self.drafts(job):
            stream, _ = await run(steps)
        steps.learn_rejections()
        return replace(stream, failed=tuple(steps.failed))

    async def call_upstream(self, job: ChatJob, call: UpstreamCall) -> ChatResult:
        """Reserve the cost of the call, make it and book its cost. Raises `AccountBudgetError` and
        the errors of the upstream."""
        # A free call has no cost to learn: cancel it when its client leaves.
        seconds = 0.0 if job.bill.is_free(call) else self.finish_seconds
        has_left = job.record.has_left
        await job.bill.reserve(call)
        with billed_call(job.bill, call) as state:
            work = call.served.upstream.complete(call.body)
            completed = await shield_for(work, seconds, has_left, state.idle)
        call.abandoned = has_left()
        job.bill.paid(call, completed.usage, perf_counter() - state.started)
        return ChatResult(call, completed)

    def drafts(self, job: ChatJob) -> AbstractContextManager[None]:
        """Bill the drafts of searches inside the block to the job."""
        return send_drafts(partial(self.call_upstream, job))

    async def _open_stream(self, job: ChatJob, call: UpstreamCall) -> ChatStream:
        chunks = call.served.upstream.stream(call.body)
        received = ReceivedChunks()
        if call.reasons:
            keep = partial(setattr, call, "rationale")
            chunks = trim_stream(chunks, _trimmer(job, call), keep, received)
        await job.bill.reserve(call)
        with billed_call(job.bill, call, received) as state:
            # Until the first chunk, which comes with content, another tier may still answer.
            first = await anext(chunks, None)
            if first is None:
                raise ApiError("the model's stream was empty", status=502)
        return ChatStream(call, with_first(first, chunks), state.started)

    def needs_full_answer(self, job: ChatJob) -> bool:
        """Return whether escalation needs the full answer before streaming."""
        return any(job.confidence_fields.values())

    async def augmented(self, request: ChatRequest, shown: Sequence[Candidate]) -> Body:
        """Return the body with the demonstrations; encode their images off the event loop."""
        images = [image for one in shown for image in one.example.query.images]
        return await self.encode(images, partial(augmented, request, shown, self.data_url))

    async def encode(self, images: Collection[Image], work: Callable[[], Body]) -> Body:
        if not images:
            return work()
        return await self.decoding.run(images, partial(asyncio.to_thread, work), Image.wire_cost)

    def without_extras(
        self, job: ChatJob, call: UpstreamCall, completed: ChatCompletion
    ) -> ChatCompletion:
        """Return the reply that the client requested: one choice, without the log-probabilities or
        further choices that only the gateway needed."""
        if job.query is None or not job.confidence_fields.get(call.served.name):
            return completed
        pipeline, query = job.query.pipeline, job.query.query
        answers = [pipeline.parse(query, one) for one in completed.completions]
        text = pipeline.choose(answers).text
        chosen = next((i for i, one in enumerate(answers) if one.text == text), 0)
        reply = orjson.loads(completed.payload)
        choice = {**reply["choices"][chosen], "index": 0}
        if not job.request.body.get("logprobs"):
            choice.pop("logprobs", None)
        payload = orjson.dumps({**reply, "choices": [choice]})
        completion = completed.completions[chosen]
        return ChatCompletion(payload, completed.model, (completion,), completed.usage)

    async def tier_order(self, job: ChatJob) -> list[ServedTier]:
        """Return the tiers to try: the routed one, then more expensive ones, then cheaper ones; a
        tier that the client named is the only one. Raises `ApiError` if none supports the request.
        """
        routed, is_named = await self._routed(job)
        position = next(i for i, served in enumerate(self.served) if served.name == routed)
        others = [*self.served[position + 1 :], *reversed(self.served[:position])]
        order = [self.served[position], *([] if is_named else others)]
        able = [served for served in order if served.capabilities.support(job.request)]
        if able:
            if able[0] is not order[0]:
                job.record.add_route_reason(f"{routed} does not support the request")
            may = [able[0], *(one for one in able[1:] if self._may_replace(job, able[0], one))]
            account, request = job.record.account.id, job.request
            # Nearly always there are none. One, which a client can cause, must not lead there.
            if len(self.rejections) and job.may_use_master:
                may.sort(key=lambda one: self.rejections.knows(account, one.name, request))
            if may[0] is not able[0]:
                job.record.add_route_reason(f"{able[0].name} rejected such a request recently")
            return may
        capabilities = [served.capabilities for served in order]
        raise unsupported_request(job.request, capabilities, routed if is_named else "")

    def _may_replace(self, job: ChatJob, failed: ServedTier, other: ServedTier) -> bool:
        # A client can make a tier fail, so a fallback must not reach the master either.
        if job.query is None and not job.may_use_master and other is self.served[-1]:
            return False
        position = self.served.index
        is_above = position(other) > position(failed)
        return self.fallback == "any" or (self.fallback == "up" and is_above)

    async def _routed(self, job: ChatJob) -> tuple[str, bool]:
        """Return the name of the routed tier, and whether the client named it."""
        overrides, query, record = job.overrides, job.query, job.record
        requested = f"requested by the {'experiment' if record.variant else 'client'}"
        if overrides.tier is not None:
            record.add_route_reason(f"tier {requested}")
            return overrides.tier, True
        if overrides.master_rate is not None:
            record.add_route_reason(f"random share {overrides.master_rate:g} {requested}")
            use_master = self.random.random() < overrides.master_rate
            return self.served[-1 if use_master else 0].name, False
        if query is None:
            # Clients control which requests pass, so the tiers of the key apply here, too.
            cheap = job.bypass in CHEAP or not job.may_use_master
            if job.bypass is None:
                record.add_route_reason("the cache is not available")
            return self.served[0 if cheap else -1].name, False
        try:
            tier = await query.pipeline.route(query.query)
        except ApiError:
            raise
        except (EmbeddingError, ImageError) as error:
            record.degraded = True
            record.add_route_reason("the embedder cannot read the question")
            self.warn("question not embedded, master used", error)
            return self.served[-1].name, False
        except BottegaError as error:
            record.degraded = True
            record.add_route_reason("routing failed")
            self.warn("routing failed, cheapest tier used", error)
            return self.served[0].name, False
        if tier.reason:
            record.add_route_reason(tier.reason)
        return tier.name, False


def _trimmer(job: ChatJob, call: UpstreamCall) -> Trim:
    """Return the function that trims a reply with reasoning: a user's pipeline reads the answer
    with its own parser."""
    query = job.query
    if query is None or call.served.prompt is None:
        return trim_reply
    return partial(trim_reply, read=partial(query.pipeline.parse, query.query))


def _stream_of(job: ChatJob, result: ChatResult) -> ChatStream:
    """Return the stream of a complete reply."""
    call, completed = result.call, result.completed
    if call.reasons:
        completed, call.rationale = _trimmer(job, call)(completed)
    return ChatStream(call, replayed_chunks(completed.payload), perf_counter())


class _JobSteps(Generic[T]):
    """Steps of a chat job for `pipeline.run`: each failed tier is replaced by the next one."""

    def __init__(
        self,
        completer: Completer,
        job: ChatJob,
        send: Callable[[ChatJob, UpstreamCall], Awaitable[T]],
        to_outcome: Callable[[ChatResult], T],
    ) -> None:
        self._completer, self._job, self._send = completer, job, send
        self._to_outcome = to_outcome
        self._waiting: list[ServedTier] = []
        self._call: UpstreamCall | None = None
        self._without_examples = self._without_fields = False
        self._rejected: list[tuple[ServedTier, BottegaError]] = []
        self._failure: BottegaError | None = None  # of a tier that did not reject
        self.dismissed: list[ChatResult] = []
        self.failed: list[str] = []

    async def route(self) -> ServedTier:
        self._waiting = await self._completer.tier_order(self._job)
        return self._waiting.pop(0)

    async def demonstrations(self, served: ServedTier) -> list[Candidate]:
        """Return the demonstrations for this tier, none if they cannot be found."""
        query, overrides, tier = self._job.query, self._job.overrides, served.tier
        if self._without_examples or query is None or not overrides.retrieve:
            return []
        if served.passages is not None:
            return []  # passages are not in the prompt
        if overrides.shots is not None and tier.shots:
            tier = replace(tier, shots=overrides.shots)
        try:
            return await query.pipeline.demonstrations(query.query, tier)
        except ApiError:
            raise
        except BottegaError as error:
            if not isinstance(error, EmptyKnowledgeBaseError):
                self._job.record.degraded = True
                self._completer.warn("no demonstrations", error)
            return []

    async def generate(self, served: ServedTier, shown: list[Candidate]) -> T:
        self._call = None  # an error before the call has no tier to replace
        job = self._job
        job.record.route, job.record.model = served.name, served.upstream.model
        kept = fitting(shown, job.request, served.capabilities)
        if kept and may_search(job, served):
            found = await self._search(served, len(kept))
            if found is not None:
                return self._to_outcome(found)
        self._call = await self._build_call(served, kept)
        if served.passages is not None and not self._without_examples:
            self._call = await self._with_passages(self._call, served.passages)
        return await self._send(job, self._call)

    async def _with_passages(self, call: UpstreamCall, passages: TierPassages) -> UpstreamCall:
        """Return the call with compressed passages, unchanged if none can be read."""
        query, overrides, shots = self._job.query, self._job.overrides, call.served.tier.shots
        shots = shots if overrides.shots is None else overrides.shots
        if query is None or query.pipeline.retrieve is None or not (overrides.retrieve and shots):
            return call
        try:
            found = await query.pipeline.retrieve(query.query, max(passages.fetch, shots))
            read = await passages.read(query.query, found, shots)
        except ApiError:
            raise
        except BottegaError as error:
            self._job.record.degraded = True
            self._completer.warn("no passages", error)
            return call
        if read is None:
            return call
        shown, prefix, compression = read
        upstream = cast(PrefixUpstream, call.served.upstream).with_prefix(prefix)
        served = replace(call.served, upstream=upstream)
        return replace(call, served=served, shown=tuple(shown), compression=compression)

    async def _search(self, served: ServedTier, shots: int) -> ChatResult | None:
        """Return the answer that the tier's search finds, None if it finds none: the nearest
        demonstrations are used."""
        job, completer = self._job, self._completer
        assert served.search is not None and job.query is not None
        search = RequestSearch(
            job,
            job.query,
            served,
            served.search,
            partial(self._build_call, served),
            completer.call_upstream,
            completer.encode,
            completer.data_url,
        )
        try:
            with span("search"):
                found = await search.run(shots)
        except (SearchError, AccountBudgetError) as error:
            job.record.search = error.reason if isinstance(error, SearchError) else "budget"
            # A repeat of the request searches again.
            job.record.degraded = True
            completer.warn("no search result", error)
            return None
        if job.record.has_left():
            raise asyncio.CancelledError
        job.record.search = SEARCHED
        return found

    async def _build_call(self, served: ServedTier, shown: Sequence[Candidate]) -> UpstreamCall:
        """Return the call of a tier with these demonstrations."""
        job, kept = self._job, list(shown)
        prompt: Prompt | None = None
        reasons = served.reasons and job.query is not None and may_reason(job.request)
        if served.turns_only:
            kept = without_rationales(kept)
        with span("prompt", {"bottega.demonstrations": len(kept)}):
            if served.prompt is None:
                body = await self._completer.augmented(job.request, kept)
                body = with_instruction(body) if reasons else body
            else:
                prompt = served.prompt(self._last_turn(), kept)
                work = partial(prompted, job.request, prompt, self._completer.data_url)
                body = await self._completer.encode(prompt.images, work)
        fields = job.confidence_fields.get(served.name)
        if fields and not self._without_fields:
            body = {**body, **fields}
        return UpstreamCall(served, body, tuple(kept), prompt, reasons=reasons)

    def _last_turn(self) -> Query:
        """Return the query without the images of earlier turns, which stay in those turns."""
        job = self._job
        if job.query is None:
            raise ApiError(
                "the pipeline served here cannot answer this request:"
                f" {job.bypass or 'it has no question'}",
                code="unsupported",
                hint="end with a user turn of text and images, without tools or audio",
            )
        images = job.query.query.images
        count = len(job.request.messages[-1].images)
        return replace(job.query.query, images=images[len(images) - count :])

    async def recover(self, served: ServedTier, error: BottegaError) -> ServedTier:
        call = self._call
        record = self._job.record
        if isinstance(error, AccountBudgetError) and not (record.tier_errors or self.dismissed):
            record.route = record.model = ""  # no tier was asked
        if isinstance(error, AccountBudgetError) and self._rejected:
            raise self._rejected[0][1] from error
        if call is None or not isinstance(error, GenerationError | SettingError):
            raise error
        if isinstance(error, MisconfiguredError):
            error.tier = served.name
        record.tier_errors.append(f"{served.name}: {error}")
        if record.has_left():
            raise asyncio.CancelledError from error  # no client: ask no other tier
        if self._retries_without(served, call, error):
            return served
        self.failed.append(served.name)
        if is_content_policy(error):
            raise error
        # Another model may support the request. If all reject it, raise the first tier's error.
        if _is_rejected(error):
            self._rejected.append((served, error))
            if not self._job.may_use_master:
                master = self._completer.served[-1]
                self._waiting = [one for one in self._waiting if one is not master]
        else:
            self._failure = error
        if not (self._waiting or self.dismissed):
            raise self._failure or self._rejected[0][1]
        # Another tier may cost more than planned: the operator must see it.
        self._completer.warn.count(f"{served.name} failed, another tier used")
        fields = self._rejected_features(error) & self._job.request.body.keys()
        remedy = f"; drop_fields = {orjson.dumps(sorted(fields)).decode()} leaves it out"
        log.warning(
            "request %s: %s failed, using another tier: %s%s",
            self._job.record.request_id,
            served.name,
            error,
            remedy if fields else "",
        )
        if not self._waiting:
            raise error
        self._job.record.add_route_reason(f"fell back from {served.name}: {reason_of(error)}")
        return self._waiting.pop(0)

    def _retries_without(self, served: ServedTier, call: UpstreamCall, error: BottegaError) -> bool:
        """Return whether the tier is tried again without what the gateway added to the request,
        which may be the cause: a field, or demonstrations that are too long, have too many images,
        or crash the server."""
        job, may_be_ours = self._job, _is_rejected(error) or getattr(error, "status", None) == 500
        fields = () if self._without_fields else job.confidence_fields.get(served.name) or ()
        if _is_rejected(error) and any(re.search(rf"\b{name}\b", str(error)) for name in fields):
            self._without_fields, left_out = True, ", ".join(fields)
            job.record.add_route_reason(f"{served.name} rejected {left_out}")
        elif call.shown and may_be_ours and not self._rejected_features(error):
            self._without_examples, left_out = True, "demonstrations"
            job.record.add_route_reason(f"{served.name} is tried without demonstrations")
        else:
            return False
        request, name = job.record.request_id, served.name
        log.warning("request %s: %s is tried again without %s: %s", request, name, left_out, error)
        return True

    def _rejected_features(self, error: BottegaError) -> set[str]:
        """Return the client's own fields and roles that the tier rejects."""
        if not _is_rejected(error) or is_too_long(error):
            return set()
        return named_features(self._job.request, error)

    def learn_rejections(self) -> None:
        """Remember the rejections once another tier has answered: else the request is at fault."""
        job = self._job
        for served, error in self._rejected:
            self._completer.rejections.learn(job.record.account.id, served.name, job.request, error)

    async def escalate(self, outcome: T) -> ServedTier | None:
        job, query = self._job, self._job.query
        if not isinstance(outcome, ChatResult) or query is None or not job.escalates:
            return None
        assert query.pipeline.escalate is not None
        answer = query.pipeline.parse_reply(query.query, outcome.completed.completions)
        tier = await query.pipeline.escalate(query.query, outcome.call.served.tier, answer)
        better = next(
            (one for one in self._completer.served if tier is not None and one.name == tier.name),
            None,
        )
        if better is None or not better.capabilities.support(job.request):
            return None
        if outcome.call.abandoned:
            raise asyncio.CancelledError  # no client: do not escalate
        assert tier is not None
        reason = tier.reason or f"escalated from {outcome.call.served.name}"
        job.record.add_route_reason(reason)
        self.dismissed.append(outcome)
        self._waiting = [served for served in self._waiting if served is not better]
        return better


def _is_rejected(error: BottegaError) -> bool:
    if isinstance(error, MisconfiguredError):
        return False
    return isinstance(error, RejectedError | PromptRejectedError)


async def with_first(first: bytes, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield a chunk that was read ahead, and then the others."""
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()


@dataclass
class _Sender:
    send: SendDraft | None


@contextmanager
def send_drafts(send: SendDraft) -> Iterator[None]:
    """Send the drafts of searches inside the block with `send`.

    A task or connection that begins inside the block keeps its context; a connection may stay open
    for days. Therefore the context refers to `send`, and so to the request, only until the end of
    the block.
    """
    sender = _Sender(send)
    token = _sender.set(sender)
    try:
        yield
    finally:
        sender.send = None
        _sender.reset(token)


class RequestDraftGenerator:
    """Generator that calls a tier within the current request, whose bill includes the draft."""

    def __init__(self, served: ServedTier, data_url: DataUrl) -> None:
        self._served = served
        self._data_url = data_url
        self.name = served.name
        self.turns_only = served.turns_only

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        sender = _sender.get(None)
        if sender is None or sender.send is None:
            raise GenerationError("a draft needs a request", hint="search with another method")
        body: Body = {
            "messages": messages_json(prompt.messages, self._data_url),
            "max_tokens": sampling.max_tokens,
            "temperature": 0,
        }
        return (await sender.send(UpstreamCall(self._served, body))).completed.reply

    async def aclose(self) -> None:
        """Leave the tier open: the gateway closes it."""


def may_search(job: ChatJob, served: ServedTier) -> bool:
    """Return whether the tier searches for this request: it needs one answer to a question."""
    body = job.request.body
    return served.search is not None and job.query is not None and body.get("n") in (None, 1)
