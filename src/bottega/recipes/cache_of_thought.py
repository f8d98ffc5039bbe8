"""Cache-of-Thought as a composition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import ChoiceParser, LabelParser
from bottega.pipeline import Pipeline
from bottega.prompting import CachePrompter, InterleavedPrompter
from bottega.protocols import (
    Escalation,
    Generator,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Router,
    Tier,
    turns_only,
)
from bottega.recipes.visual_rag import default_prompter
from bottega.recording import CacheRecorder, CompositeRecorder, UseCountRecorder
from bottega.recording.recorders import Tagger
from bottega.reranking import TopKReranker
from bottega.retrieval import DenseRetriever, EmptyTolerantRetriever, SameContextFilter
from bottega.types import Answer, Completion, Query, Sampling

T = TypeVar("T")


def cache_of_thought(
    cache: KnowledgeBase,
    *,
    route: Router | Callable[[Sequence[Tier]], Router],
    tiers: Sequence[Tier] | None = None,
    master: Generator | None = None,
    apprentice: Generator | None = None,
    shots: int = 1,
    retrieve: Retriever | None = None,
    rerank: Reranker | None = None,
    prompt: Prompter | None = None,
    parse: Parser | None = None,
    labels: Sequence[str] = (),
    reasoning: bool | None = None,
    escalate: Escalation | Callable[[Sequence[Tier]], Escalation] | None = None,
    remember: bool = True,
    tag: Tagger | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
    sampling: Sampling | None = None,
) -> Pipeline:
    """Cache-of-Thought: store the master's answers with their reasoning in `cache`, and show them
    to cheaper tiers for similar queries.

    `tiers` are ordered from cheapest to most expensive; the last one is the master. `apprentice`
    and `master` are a short form of two tiers, in which the apprentice gets `shots` demonstrations
    and the master none. `route` is a router, or a function that returns a router for the tiers,
    such as `lambda tiers: RandomRouter(tiers, 0.2)`; so is `escalate`. Both receive every trace if
    they have a method `observe`. A filled cache is the paper's warm start; use `ColdStartRouter`
    for its cold start. `remember=False` keeps the cache unchanged (static).
    `tag` adds tags to an answer before it is stored: `partial(tag_keywords, extractor=...)` writes
    the keywords of responses.

    Demonstrations include other questions about the query's image, but never an earlier answer to
    the same question. A custom `retrieve` applies its own rule.

    All tiers are prompted for their reasoning, with the same prompt (`CachePrompter`), unless
    `reasoning` is False; models that support only brief turns are not, by default. `prompt`
    replaces it for the cheaper tiers. Only the master's valid and complete answers are stored.
    """
    tiers = _tiers(tiers, master, apprentice, shots)
    tiers = _prompted(tiers, prompt, reasoning, tuple(labels))
    master_name = tiers[-1].name
    router = _part(route, tiers)
    search = retrieve or DenseRetriever(partial(cache.search, exclude="same-question"))
    escalation = None if escalate is None else _part(escalate, tiers)
    learners = (getattr(part, "observe", None) for part in (router, escalation, rerank))
    return Pipeline(
        route=router,
        escalate=escalation,
        tiers=tiers,
        retrieve=EmptyTolerantRetriever(SameContextFilter(search)),
        rerank=rerank or TopKReranker("nearest-last"),
        prompt=prompt or InterleavedPrompter(),
        parse=parse or _default_parser(tuple(labels)),
        record=CompositeRecorder(
            *learners,
            UseCountRecorder(cache, master=master_name),
            CacheRecorder(cache, stored_tiers={master_name}, tag=tag) if remember else None,
            record,
        ),
        price=price,
        sampling=sampling or Sampling(max_tokens=512),
        choices=tuple(labels),
    )


def _default_parser(labels: tuple[str, ...]) -> Parser:
    """Return a parser of letters for queries with their own choices, else of labels: what
    `CachePrompter` requests."""
    of_letters, of_labels = ChoiceParser(whole_words=True), LabelParser()

    def parse(query: Query, completion: Completion, /) -> Answer:
        own = bool(query.choices) and query.choices != labels
        return (of_letters if own else of_labels)(query, completion)

    return parse


def _tiers(
    tiers: Sequence[Tier] | None, master: Generator | None, apprentice: Generator | None, shots: int
) -> tuple[Tier, ...]:
    if tiers is None and master is not None and apprentice is not None:
        return Tier("apprentice", apprentice, shots), Tier("master", master)
    if tiers is None or master is not None or apprentice is not None:
        raise SettingError(
            f"models are incomplete or redundant, got tiers={tiers is not None},"
            f" master={master is not None} and apprentice={apprentice is not None}",
            hint="pass master= and apprentice=, or tiers=",
        )
    if not tiers or len({tier.name for tier in tiers}) < len(tiers):
        raise SettingError(
            f"tiers must be one or more with different names, got {[tier.name for tier in tiers]}",
            hint="pass at least one tier and give each tier its own name",
        )
    return tuple(tiers)


def _prompted(
    tiers: Sequence[Tier],
    prompt: Prompter | None,
    reasoning: bool | None,
    labels: tuple[str, ...],
) -> tuple[Tier, ...]:
    """Set the default prompt of each tier without a prompt."""

    def default(tier: Tier) -> Prompter:
        brief = turns_only(tier.generator)
        if prompt is not None and tier is not tiers[-1]:
            return prompt
        if not brief if reasoning is None else reasoning:
            return CachePrompter(labels)
        return prompt or (default_prompter(tier.generator) if brief else InterleavedPrompter())

    return tuple(replace(tier, prompt=tier.prompt or default(tier)) for tier in tiers)


def _part(part: T | Callable[[Sequence[Tier]], T], tiers: Sequence[Tier]) -> T:
    """Return the part, or the result of its factory. Parts are coroutine functions, factories
    not."""
    call = getattr(type(part), "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(call):
        return cast(T, part)
    return cast(Callable[[Sequence[Tier]], T], part)(tiers)
