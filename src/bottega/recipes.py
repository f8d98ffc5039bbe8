"""The published methods as short compositions of the same parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser
from bottega.pipeline import Pipeline
from bottega.prompting import AppendixA, Interleaved, Reasoned
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
)
from bottega.recording import CountUses, Remember, Several
from bottega.reranking import Order, TopK
from bottega.retrieval import Alike, Dense, UnlessEmpty
from bottega.routing import always
from bottega.types import Sampling

Part = TypeVar("Part")


@dataclass(frozen=True)
class Classification:
    """What every classification pipeline shares; only the retriever and the shots differ.

    `prompt` defaults to the one that suits the generator. Decoding is greedy.
    """

    generator: Generator
    labels: Sequence[str]
    prompt: Prompter | None = None
    multi_label: bool = False
    order: Order = "nearest-last"
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=64))
    record: Recorder | None = None
    price: Pricer | None = None
    seed: int = 0

    def pipeline(self, retrieve: Retriever | None = None, shots: int = 0) -> Pipeline:
        return Pipeline(
            route=always(Tier(self.generator.name, self.generator, shots)),
            retrieve=retrieve,
            rerank=TopK(self.order, seed=self.seed),
            prompt=self.prompt or suited_prompt(self.generator),
            parse=LabelParser(multi_label=self.multi_label),
            record=self.record,
            price=self.price,
            sampling=self.sampling,
            choices=tuple(self.labels),
        )


def suited_prompt(generator: Generator) -> Prompter:
    """Brief turns for a generator that says `turns_only`, else the paper's appendix A."""
    if getattr(generator, "turns_only", False):
        return Interleaved(show_choices=False, repeat_question=False)
    return AppendixA()


def visual_rag(
    knowledge: KnowledgeBase,
    generator: Generator,
    *,
    labels: Sequence[str],
    shots: int = 10,
    prompt: Prompter | None = None,
    order: Order = "nearest-last",
    multi_label: bool = False,
    retrieve: Retriever | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
) -> Pipeline:
    """Visual RAG (Bonomo and Bianco): the `shots` labelled images nearest to the query's become
    demonstrations. The paper's k is 5, 10, 50 or 100, without class balancing.

    `prompt` defaults to the paper's appendix A, or to turns for a model that knows only them (the
    bundled one). The paper leaves the order open: nearest last here. Another `retrieve` than the
    search of `knowledge` finds examples by something else, such as their words.
    """
    method = Classification(
        generator,
        labels,
        prompt,
        multi_label=multi_label,
        order=order,
        record=record,
        price=price,
    )
    return method.pipeline(retrieve or Dense(knowledge.search), shots)


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
        retrieve=UnlessEmpty(Alike(retrieve or Dense(cache.search))),
        rerank=rerank or TopK("nearest-last"),
        prompt=prompt or Interleaved(),
        parse=parse or LabelParser(),
        record=Several(
            *learners,
            CountUses(cache, master=teacher),
            Remember(cache, teachers={teacher}) if remember else None,
            record,
        ),
        price=price,
        sampling=sampling or Sampling(max_tokens=512),
        choices=tuple(labels),
    )


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
        brief = getattr(tier.generator, "turns_only", False)
        if tier is tiers[-1] and (not brief if reasoning is None else reasoning):
            return Reasoned()
        return prompt or (suited_prompt(tier.generator) if brief else Interleaved())

    return tuple(replace(tier, prompt=tier.prompt or suited(tier)) for tier in tiers)


def _made(part: Part | Callable[[Sequence[Tier]], Part], tiers: Sequence[Tier]) -> Part:
    """A router and an escalation are awaited when they are called; what makes one is not."""
    called = getattr(type(part), "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(called):
        return cast(Part, part)
    return cast(Callable[[Sequence[Tier]], Part], part)(tiers)
