"""The methods of the Visual RAG paper, side by side: each turns a query into an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bottega.errors import SettingError
from bottega.evaluation.benchmarks import labels_of
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Retriever
from bottega.recipes import Classification
from bottega.retrieval import Balanced, Dense, Uniform
from bottega.types import Answer, Candidate, Query, Trace

METHODS = ("zero-shot", "random", "balanced", "visual-rag", "vote")


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
    knowledge: KnowledgeBase,
    settings: Classification,
    *,
    seed: int,
) -> list[Method]:
    """Every method at every number of shots; `zero-shot` once. Raises `SettingError`."""
    check(names, shots)
    retrievers: dict[str, Callable[[], Retriever]] = {
        "random": lambda: Uniform(knowledge, seed=seed),
        "balanced": lambda: Balanced(knowledge, seed=seed),
        "visual-rag": lambda: Dense(knowledge.search),
        "vote": lambda: Dense(knowledge.search),
    }
    planned: list[Method] = []
    for name in dict.fromkeys(names):
        if name == "zero-shot":
            planned.append(Method(name, 0, _asking(settings, None, 0)))
            continue
        retrieve = retrievers[name]()
        for k in dict.fromkeys(shots):
            if name == "vote":
                answer = _voting(retrieve, k, settings.multi_label)
            else:
                answer = _asking(settings, retrieve, k)
            planned.append(Method(name, k, answer))
    return planned


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


def _asking(
    settings: Classification, retrieve: Retriever | None, shots: int
) -> Callable[[Query], Awaitable[Outcome]]:
    pipeline = settings.pipeline(retrieve, shots)

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
