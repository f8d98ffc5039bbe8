"""The methods of the Visual RAG paper and their controls: each turns a query into an answer.

`in-context` shows everything there is in an order by the seed, `oracle` the right passage among
others. The swap controls retrieve as `visual-rag` and then ask with another item's picture or
question: accuracy falls as far as the model makes use of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.controls import AsAsked, Swapped, other_picture, other_question
from bottega.evaluation.episodes import ByEpisode, Oracle, nearest, pools
from bottega.evaluation.labels import is_passage, labels_of
from bottega.evaluation.searching import Searching
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Retriever, Tier
from bottega.recipes import Classification, suited_prompt
from bottega.retrieval import Balanced, Pool, Uniform
from bottega.routing import always
from bottega.types import Answer, Candidate, Query, Trace

PAPER = ("zero-shot", "random", "balanced", "visual-rag", "vote")
READING = ("zero-shot", "random", "oracle")
CONTROLS = ("swap-image", "swap-question")
METHODS = (*PAPER, "in-context", "oracle", *CONTROLS)
SEARCHING = {"visual-rag", "vote", *CONTROLS}
LABELLED = {"balanced", "vote"}
MOST_IN_CONTEXT = 200


@dataclass(frozen=True)
class Outcome:
    """One answered query; `trace` is None where no model was asked."""

    answer: Answer
    trace: Trace | None = None


@dataclass(frozen=True)
class Method:
    name: str
    shots: int
    answer: Callable[[Query], Awaitable[Outcome]]


def plan(
    names: Sequence[str],
    shots: Sequence[int],
    data: Benchmark,
    knowledge: KnowledgeBase,
    settings: Classification,
    *,
    seed: int,
    search: Searching = nearest,
) -> list[Method]:
    """Every method at every number of shots; `zero-shot` and `in-context` once.

    `knowledge` may be empty unless `needs_search`; `search` is how those methods find examples.
    Raises `SettingError`.
    """
    check(names, shots)
    check_fit(names, data)
    planned: list[Method] = []
    for name in dict.fromkeys(names):
        if name == "zero-shot":
            planned.append(Method(name, 0, _asking(settings, None, 0, f"{name}, {data.name}")))
            continue
        retrieve = _retriever(name, data, knowledge, seed, search)
        controlled = _controlled(name, data, settings, seed)
        counts = (_largest(data),) if name == "in-context" else dict.fromkeys(shots)
        for k in counts:
            if name == "vote":
                answer = _voting(retrieve, k, settings.multi_label)
            else:
                answer = _asking(controlled, retrieve, k, f"{name}, {k} shots, {data.name}")
            planned.append(Method(name, k, answer))
    return planned


def default_methods(data: Benchmark) -> tuple[str, ...]:
    """What suits the benchmark: the paper's methods, or reading where there are passages."""
    return READING if _has_passages(data) else PAPER


def needs_search(names: Sequence[str], data: Benchmark) -> bool:
    """Whether the knowledge base has to be filled, for searching or, without episodes, at all."""
    return not data.episode_of or not SEARCHING.isdisjoint(names)


def check(names: Sequence[str], shots: Sequence[int]) -> None:
    """Raises `SettingError` for what `plan` cannot do, before anything is loaded."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise SettingError(
            f"unknown method {', '.join(unknown) or '(none given)'}",
            hint=f"choose from {', '.join(METHODS)}",
        )
    if any(k < 1 for k in shots) or not shots:
        raise SettingError("shots must be positive numbers", hint="for example --shots 5,10,20")


def check_fit(names: Sequence[str], data: Benchmark) -> None:
    """Raises `SettingError` for a method that this benchmark cannot have."""
    passages = _has_passages(data)
    if "oracle" in names and not all("passage" in item.tags for item in data.items):
        raise SettingError(
            f"{data.name} does not say which passage is right", hint="oracle is for facts"
        )
    labelled = LABELLED.intersection(names)
    if passages and labelled:
        raise SettingError(
            f"{data.name} has passages without labels, which {' and '.join(labelled)} would count",
            hint=f"use {', '.join(READING)} or visual-rag",
        )
    if "in-context" in names and not data.episode_of and len(data.knowledge) > MOST_IN_CONTEXT:
        raise SettingError(
            f"in-context would show all {len(data.knowledge)} examples to every item",
            hint=f"use --kb-per-class: it shows {MOST_IN_CONTEXT} at most",
        )


def majority(candidates: Sequence[Candidate], *, multi_label: bool = False) -> Answer:
    """The label most of the candidates have. A tie names no label, so it is wrong, as in the
    paper's retriever-only ablation. Multi-label: every label that more than half of them have."""
    votes = Counter(label for c in candidates for label in labels_of(c.example))
    if multi_label:
        chosen = tuple(label for label, n in votes.items() if 2 * n > len(candidates))
        return Answer(", ".join(chosen), labels=chosen)
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return Answer("(tie)")
    return Answer(ranked[0][0], labels=(ranked[0][0],), confidence=ranked[0][1] / len(candidates))


def _retriever(
    name: str, data: Benchmark, knowledge: KnowledgeBase, seed: int, search: Searching
) -> Retriever:
    if name in SEARCHING:
        return search(data, knowledge)
    passages = {str(item.query.id): item.tags.get("passage", "") for item in data.items}
    make: dict[str, Callable[[Pool], Retriever]] = {
        "random": lambda pool: Uniform(pool, seed=seed),
        "balanced": lambda pool: Balanced(pool, seed=seed),
        "in-context": lambda pool: Uniform(pool, seed=seed),
        "oracle": lambda pool: Oracle(pool, passages, seed=seed),
    }
    inside = {episode: make[name](pool) for episode, pool in pools(data, knowledge).items()}
    return ByEpisode(data.episode_of, inside)


def _controlled(name: str, data: Benchmark, settings: Classification, seed: int) -> Classification:
    """The settings of the method: those given, or with the prompt and the traces of a control."""
    others = {"swap-image": other_picture, "swap-question": other_question}
    if name not in others:
        return settings
    prompt = settings.prompt or suited_prompt(settings.generator)
    other = others[name](data, seed=seed)
    record = settings.record and AsAsked(settings.record, other)
    return replace(settings, prompt=Swapped(prompt, other), record=record)


def _largest(data: Benchmark) -> int:
    """How many examples the largest episode has."""
    sizes = Counter(data.episode_of.get(example.query.id or "", "") for example in data.knowledge)
    return max(sizes.values())


def _has_passages(data: Benchmark) -> bool:
    return any(map(is_passage, data.knowledge))


def _asking(
    settings: Classification, retrieve: Retriever | None, shots: int, tier: str
) -> Callable[[Query], Awaitable[Outcome]]:
    """`tier` is what the traces are found by."""
    route = always(Tier(tier, settings.generator, shots))
    pipeline = replace(settings.pipeline(retrieve, shots), route=route)

    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return answer


def _voting(
    retrieve: Retriever, shots: int, multi_label: bool
) -> Callable[[Query], Awaitable[Outcome]]:
    async def answer(query: Query) -> Outcome:
        return Outcome(majority(await retrieve(query, shots), multi_label=multi_label))

    return answer
