"""Cache-of-Thought as a composition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser
from bottega.pipeline import Pipeline
from bottega.prompting import InterleavedPrompter, ReasoningPrompter
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
from bottega.reranking import TopKReranker
from bottega.retrieval import DenseRetriever, EmptyTolerantRetriever, SameContextFilter
from bottega.types import Sampling

Part = TypeVar("Part")


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
    record: Recorder | None = None,
    price: Pricer | None = None,
    sampling: Sampling | None = None,
) -> Pipeline:
    """Cache-of-Thought: a master's answers, with their reasoning, are kept in the `cache` and shown
    to cheaper models that are asked something similar.

    `tiers` stand cheapest first and the last is the master; `apprentice` and `master` are the short
    form of two, where the apprentice is shown `shots` answers and the master none. `route` chooses
    among them: a router, or what makes one of the tiers, such as
    `lambda tiers: coin(tiers, 0.2)`; `escalate` likewise. Both are told of every answer if
    they `observe`. A cache that is not empty is the paper's warm start, `cold_start` its cold
    one. Without `remember` the cache stays as it is (static).

    Demonstrations include other questions about the query's image, but never its own earlier
    answer. A custom `retrieve` applies its own rule.

    The master is asked for its reasoning unless `reasoning` is False, or is not given and the
    master says `turns_only`. Only its answers are kept: never an invalid one or one that was cut.
    """
    tiers = _tiers(tiers, master, apprentice, shots)
    tiers = _prompted(tiers, prompt, reasoning)
    teacher = tiers[-1].name
    router = _made(route, tiers)
    escalation = None if escalate is None else _made(escalate, tiers)
    learners = (getattr(part, "observe", None) for part in (router, escalation, rerank))
    return Pipeline(
        route=router,
        escalate=escalation,
        tiers=tiers,
        retrieve=EmptyTolerantRetriever(SameContextFilter(retrieve or _search(cache))),
        rerank=rerank or TopKReranker("nearest-last"),
        prompt=prompt or InterleavedPrompter(),
        parse=parse or LabelParser(),
        record=CompositeRecorder(
            *learners,
            UseCountRecorder(cache, master=teacher),
            CacheRecorder(cache, teachers={teacher}) if remember else None,
            record,
        ),
        price=price,
        sampling=sampling or Sampling(max_tokens=512),
        choices=tuple(labels),
    )


def _search(cache: KnowledgeBase) -> Retriever:
    return DenseRetriever(partial(cache.search, exclude="same-question"))


def _tiers(
    tiers: Sequence[Tier] | None,
    master: Generator | None,
    apprentice: Generator | None,
    shots: int,
) -> tuple[Tier, ...]:
    if tiers is None and master is not None and apprentice is not None:
        return Tier("apprentice", apprentice, shots), Tier("master", master)
    if tiers is None or master is not None or apprentice is not None:
        raise SettingError("who shall answer?", hint="give master and apprentice, or tiers alone")
    if not tiers or len({tier.name for tier in tiers}) < len(tiers):
        raise SettingError(
            f"the tiers are {[tier.name for tier in tiers]}",
            hint="give one at least, and each a name of its own",
        )
    return tuple(tiers)


def _prompted(
    tiers: Sequence[Tier], prompt: Prompter | None, reasoning: bool | None
) -> tuple[Tier, ...]:
    """Each with the prompt that suits it, where it has none of its own and no other is given."""

    def suited(tier: Tier) -> Prompter:
        brief = turns_only(tier.generator)
        if tier is tiers[-1] and (not brief if reasoning is None else reasoning):
            return ReasoningPrompter()
        return prompt or (default_prompter(tier.generator) if brief else InterleavedPrompter())

    return tuple(replace(tier, prompt=tier.prompt or suited(tier)) for tier in tiers)


def _made(part: Part | Callable[[Sequence[Tier]], Part], tiers: Sequence[Tier]) -> Part:
    """A router and an escalation are awaited when they are called; what makes one is not."""
    called = getattr(type(part), "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(called):
        return cast(Part, part)
    return cast(Callable[[Sequence[Tier]], Part], part)(tiers)
