"""Pipeline: route, retrieve, re-rank, prompt, generate, parse and record one query.

The input is a `Query`. Gold answers belong to `Example`, so they cannot reach the pipeline.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from PIL.Image import Image as PILImage

from bottega._util.event_loops import BACKGROUND_LOOP, for_each
from bottega._util.progress import Progress, showing_progress
from bottega._util.tracing import Attributes, Tracer, span, use_tracer
from bottega.errors import BatchError, BottegaError, SettingError, check_count
from bottega.image import Image
from bottega.protocols import (
    Escalation,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Router,
    Searcher,
    Tier,
)
from bottega.types import (
    IMAGE_QUESTION,
    Answer,
    Candidate,
    Completion,
    Query,
    Reply,
    Sampling,
    SearchResult,
    Trace,
)

T = TypeVar("T")
QueryInput = Query | Image | PILImage | str | os.PathLike[str]


class Named(Protocol):
    @property
    def name(self) -> str: ...


TierT = TypeVar("TierT", bound=Named)
R = TypeVar("R")


class Steps(Protocol[TierT, R]):
    """Steps of one query; `run` holds their order. Python runs those of a `Pipeline`; the gateway's
    steps add access rights, costs, fallback and streams."""

    async def route(self) -> TierT:
        """Return the first tier."""
        ...

    async def demonstrations(self, tier: TierT, /) -> list[Candidate]:
        """Return the retrieved and re-ranked demonstrations."""
        ...

    async def generate(self, tier: TierT, shown: list[Candidate], /) -> R:
        """Prompt the tier and return its parsed reply, or a stream that has begun."""
        ...

    async def recover(self, tier: TierT, error: BottegaError, /) -> TierT:
        """Return the tier to ask after a failure of `generate`. Raises if there is none."""
        ...

    async def escalate(self, outcome: R, /) -> TierT | None:
        """Return the tier to ask next, None to keep this outcome."""
        ...


async def run(steps: Steps[TierT, R]) -> tuple[R, list[R]]:
    """Route, retrieve, rerank, prompt, generate and parse; again for each tier that the query
    escalates to. Return the final outcome and the dismissed ones. The caller records the outcome,
    of a stream at its end."""
    dismissed = list[R]()
    with span("route") as routing:
        tier = await steps.route()
        routing.set({"bottega.tier": tier.name})
    while True:
        shown = await steps.demonstrations(tier)
        try:
            outcome = await steps.generate(tier, shown)
        except BottegaError as error:
            tier = await steps.recover(tier, error)
            continue
        better = await steps.escalate(outcome)
        if better is None:
            return outcome, dismissed
        dismissed.append(outcome)
        tier = better


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of any part, such as `retrieve(query, 5)`, and return its result.

    The coroutine runs on the event loop of the `_sync` methods. Works inside a running loop.
    """
    return BACKGROUND_LOOP.run(work)


@dataclass(frozen=True)
class FixedRouter:
    """Router of a pipeline with one tier."""

    tier: Tier

    async def __call__(self, query: Query, /) -> Tier:
        return self.tier


@dataclass(frozen=True)
class Pipeline:
    """Steps that turn a query into an answer, and the order of these steps.

    A query is a `Query`, an image (`Image` or PIL) or the path of an image file. An image alone is
    queried with `question`. A text without an image is passed as `Query("...")`.

    The methods are coroutines. The `_sync` variants run them on one background event loop per
    process, and so work in scripts, in threads and in notebooks, where a loop is running already.

    `route` selects the tier, and `retrieve` and `rerank` its demonstrations; without `retrieve`
    there are none. `prompt` shows them to the model, which answers with the settings `sampling`.
    `parse` reads the answer, `price` computes the cost, and `record` receives the trace.

    `fetch` is the number of candidates retrieved for the re-ranker (default: the tier's shots).
    `choices` apply to queries without choices of their own. `choose` selects one of several sampled
    answers (default: the first). `escalate` may pass a query on to another tier after an answer.
    `tiers` lists the tiers that a client may request by name. `search` replaces every step from
    re-ranking to parsing for tiers with shots. `tracer` measures the steps, see
    `bottega.telemetry.instrument`.
    """

    route: Router
    prompt: Prompter
    parse: Parser
    retrieve: Retriever | None = None
    rerank: Reranker | None = None
    record: Recorder | None = None
    price: Pricer | None = None
    sampling: Sampling = field(default_factory=Sampling)
    choices: tuple[str, ...] = ()
    fetch: int | None = None
    choose: Callable[[Sequence[Answer]], Answer] = itemgetter(0)
    escalate: Escalation | None = None
    tiers: tuple[Tier, ...] = ()
    search: Searcher | None = None
    question: str = IMAGE_QUESTION
    tracer: Tracer | None = None

    async def answer(self, query: QueryInput) -> Answer:
        """Return the answer to a query."""
        return (await self.trace(query)).answer

    def answer_sync(self, query: QueryInput) -> Answer:
        """Return the answer to a query: `answer` for synchronous code."""
        return run_sync(self.answer(query))

    def trace_sync(self, query: QueryInput) -> Trace:
        """Return the trace of a query: `trace` for synchronous code."""
        return run_sync(self.trace(query))

    def answer_batch_sync(
        self, queries: Iterable[QueryInput], *, concurrency: int = 8, progress: Progress = False
    ) -> list[Answer]:
        """Return the answers to many queries: `answer_batch` for synchronous code."""
        return run_sync(self.answer_batch(queries, concurrency=concurrency, progress=progress))

    async def answer_batch(
        self, queries: Iterable[QueryInput], *, concurrency: int = 8, progress: Progress = False
    ) -> list[Answer]:
        """Return the answers in the order of the queries, `concurrency` of them at a time.

        `progress=True` shows a progress bar on standard error, or in the notebook; a callback
        receives the number of queries done since its last call. Every query is tried. If some fail,
        `BatchError` is raised at the end: it holds the other answers and the errors.
        """
        if isinstance(queries, str | os.PathLike):
            raise SettingError(
                f"queries must be a list, got {os.fspath(queries)!r}",
                hint=f"pass [{os.fspath(queries)!r}], or call answer for one query",
            )
        check_count("concurrency", concurrency)
        inputs = list(queries)
        answers: list[Answer | None] = [None] * len(inputs)
        errors: dict[int, Exception] = {}
        with showing_progress("Answering", len(inputs), progress) as step:

            async def answer(index: int) -> None:
                try:
                    answers[index] = await self.answer(inputs[index])
                except Exception as error:  # raised below, with the answers to the other queries
                    errors[index] = error
                step(1)

            await for_each(range(len(inputs)), answer, limit=concurrency)
        if errors:
            raise BatchError(answers, errors) from errors[min(errors)]
        return [answer for answer in answers if answer is not None]

    async def trace(self, query: QueryInput) -> Trace:
        """Answer a query, record the trace and return it."""
        with use_tracer(self.tracer), span("answer") as root:
            trace = await self._trace(query)
            root.set(_trace_attributes(trace))
        return trace

    async def _trace(self, query: QueryInput) -> Trace:
        started, clock = time.time(), time.perf_counter()
        if not isinstance(query, Query):
            query = Query(self.question, (await asyncio.to_thread(_image, query),))
        images = query.images
        if not (isinstance(images, tuple) and all(isinstance(image, Image) for image in images)):
            raise SettingError(
                f"images must be a tuple of Image, got {images!r:.80}",
                hint="pass (Image.open(path),)",
            )
        # Copy even if nothing changes: `retrieval.SharedRetriever` compares queries by identity.
        query = replace(query, choices=query.choices or self.choices)
        (tier, found), dismissed = await run(_QuerySteps(self, query))
        earlier = [one for one, _ in dismissed]
        results = (*(one for _, one in dismissed), found)
        # The usage of a search includes that of its chosen reply.
        usages = [one.tree.usage if one.tree else one.reply.usage for one in results]
        spent = [replace(one.reply, usage=u) for one, u in zip(results, usages, strict=True)]
        trace = Trace(
            id=uuid.uuid4().hex[:16],
            time=started,
            query=query,
            tier=tier.name,
            candidates=found.shown,
            prompt=found.prompt,
            reply=found.reply,
            answer=found.answer,
            seconds=time.perf_counter() - clock,
            cost_usd=self._cost(spent),
            dismissed=tuple(one.reply for _, one in dismissed),
            tree=found.tree,
            compression=found.compression,
            reason="; ".join(one.reason for one in (*earlier, tier) if one.reason),
        )
        if self.record is not None:
            with span("record"):
                await self.record(trace)
        return trace

    async def demonstrations(self, query: Query, tier: Tier) -> list[Candidate]:
        """Return the demonstrations for this tier, in the order in which they are shown."""
        if self.retrieve is None or tier.shots == 0:
            return []
        candidates = await self.candidates(query, tier)
        if self.rerank is None:
            return candidates[: tier.shots]
        with span("rerank") as step:
            shown = await self.rerank(query, candidates, tier.shots)
            step.set({"bottega.demonstrations": len(shown)})
        return shown

    async def candidates(self, query: Query, tier: Tier) -> list[Candidate]:
        """Return the retrieved candidates for this tier, best first, none without a retriever."""
        if self.retrieve is None:
            return []
        with span("retrieve", {"gen_ai.operation.name": "retrieval"}) as step:
            found = await self.retrieve(query, self.fetch or tier.shots)
            best = found[0].score if found else None
            step.set({"bottega.candidates": len(found), "bottega.similarity": best})
        return found

    async def generate(self, query: Query, tier: Tier, shown: Sequence[Candidate]) -> SearchResult:
        """Return the reply and the answer of this tier, shown these demonstrations."""
        with span("prompt", {"bottega.demonstrations": len(shown)}):
            prompt = (tier.prompt or self.prompt)(query, shown)
        reply = await tier.generator.generate(prompt, tier.sampling or self.sampling)
        return SearchResult(tuple(shown), prompt, reply, self.parse_reply(query, reply.completions))

    def parse_reply(self, query: Query, completions: Sequence[Completion]) -> Answer:
        """Return the answer that `choose` makes of those of all completions."""
        with span("parse") as step:
            answer = self.choose([self.parse(query, completion) for completion in completions])
            step.set({"bottega.valid": answer.valid})
        return answer

    def _cost(self, replies: Sequence[Reply]) -> float | None:
        if self.price is None:
            return None
        costs = [self.price(reply.model, reply.usage) for reply in replies]
        priced = [cost for cost in costs if cost is not None]
        return sum(priced) if len(priced) == len(costs) else None


@dataclass(frozen=True)
class _QuerySteps:
    """Steps of a query without fallback."""

    pipeline: Pipeline
    query: Query

    async def route(self) -> Tier:
        return await self.pipeline.route(self.query)

    async def demonstrations(self, tier: Tier) -> list[Candidate]:
        pipeline = self.pipeline
        if pipeline.search is None or pipeline.retrieve is None or not tier.shots:
            return await pipeline.demonstrations(self.query, tier)
        return await pipeline.candidates(self.query, tier)

    async def generate(self, tier: Tier, shown: Sequence[Candidate]) -> tuple[Tier, SearchResult]:
        pipeline = self.pipeline
        if pipeline.search is None or pipeline.retrieve is None or not tier.shots:
            return tier, await pipeline.generate(self.query, tier, shown)
        with span("search"):
            return tier, await pipeline.search.search(self.query, shown, tier.shots)

    async def recover(self, tier: Tier, error: BottegaError) -> Tier:
        raise error

    async def escalate(self, outcome: tuple[Tier, SearchResult]) -> Tier | None:
        tier, found = outcome
        escalate = self.pipeline.escalate
        return None if escalate is None else await escalate(self.query, tier, found.answer)


def _trace_attributes(trace: Trace) -> Attributes:
    return {
        "bottega.trace_id": trace.id,
        "bottega.tier": trace.tier,
        "bottega.demonstrations": len(trace.candidates),
        "bottega.cost_usd": trace.cost_usd,
    }


def _image(given: Image | PILImage | str | os.PathLike[str]) -> Image:
    if isinstance(given, Image):
        return given
    if isinstance(given, PILImage):
        return Image.from_pillow(given)
    if isinstance(given, str) and not os.path.isfile(given):  # noqa: PTH113 - a Path raises for long texts
        problem = f"got {given!r}" if os.path.exists(given) else f"{given!r} does not exist"  # noqa: PTH110 - as above
        raise SettingError(
            f"query must be the path of an image file, {problem}",
            hint='check the path; pass Query("...") to send a text',
        )
    if isinstance(given, str | os.PathLike):
        return Image.open(os.fspath(given))
    raise SettingError(
        f"query must be a Query, an image or a path, got {type(given).__name__}",
        hint='pass Query("..."), Image.open(path), Image.from_bytes(data) or a PIL image',
    )
