"""The methods that are compared, and their controls: each turns a query into an answer.

`vote`, `vote-strict`, `nearest` and `knn` choose a label among the retrieved examples without a
model (`votes`).
`top-k` shows the nearest examples; where they are labelled images that is `visual-rag`. `majority`
and `best-of-n` do the same and choose among several samples. `rcts` searches for the examples that
help; `rcts-random` and `rcts-best-of-n` have its reward and its budget, and no tree. `in-context`
shows everything there is in an order by the seed, `oracle` the right passage among others. `concat`
shows passages with retrieval scores, `racc` has them compressed; `candidates` answers from each
passage alone and takes what is likeliest together with its passage, `kv-reuse` reads each passage
alone and puts their keys and values before the question. The swap controls retrieve as `visual-rag`
and then ask with another item's picture or question: accuracy falls as far as the model makes use
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bottega.errors import SettingError
from bottega.evaluation.baselines import BASELINES, NEAREST, VOTES, baseline
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.controls import (
    SwappedPrompter,
    SwappedQueryRecorder,
    other_picture,
    other_question,
)
from bottega.evaluation.episodes import (
    EpisodeRetriever,
    OracleRetriever,
    episode_pools,
    nearest,
    pools,
)
from bottega.evaluation.labels import by_id, is_passage, names_passages
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.prompts import prompt_for
from bottega.evaluation.racc_methods import (
    COMPRESSED,
    CONCAT,
    ORACLE,
    LateInteractionScorer,
    check_compressing,
    compressed,
)
from bottega.evaluation.search_methods import (
    ROLLOUTS,
    SEARCHED,
    TEMPERATURE,
    RetrieverFactory,
    most_calls,
    searched,
)
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import suggestion
from bottega.parsing.replies import most_confident, most_frequent
from bottega.pipeline import Pipeline
from bottega.protocols import Retriever, Tier
from bottega.recipes import Classifier, default_prompter
from bottega.retrieval import BalancedSampler, LabelledPool, UniformSampler
from bottega.routing import FixedRouter
from bottega.types import Answer, Candidate, Query

PAPER = ("zero-shot", "random", "balanced", "visual-rag", "vote")
LABEL_METHODS = (*PAPER, NEAREST, "knn")
READING = ("zero-shot", "random", "oracle")
CONTROLS = ("swap-image", "swap-question")
ANSWERING = ("zero-shot", "random", "top-k")
CHOOSING = {"majority": most_frequent, "best-of-n": most_confident}
READ = (CONCAT, *BASELINES, *COMPRESSED)
METHODS = (
    *("zero-shot", "random", "balanced", "visual-rag", *VOTES, "top-k", *CHOOSING, *SEARCHED),
    *("in-context", "oracle", *READ, *CONTROLS),
)
SEARCHING = {"top-k", "visual-rag", *VOTES, *CHOOSING, *SEARCHED, *CONTROLS}
LABELLED = {"balanced", *VOTES}
MOST_IN_CONTEXT = 200
SAMPLES = 5


def plan(
    names: Sequence[str],
    shots: Sequence[int],
    data: Benchmark,
    knowledge: KnowledgeBase,
    settings: Classifier,
    *,
    seed: int,
    search: RetrieverFactory = nearest,
    samples: int | None = None,
    rollouts: int = ROLLOUTS,
    rationales: bool | None = None,
    compressor: Path | None = None,
    hyper: TransformersGenerator | None = None,
    store: Path | None = None,
) -> list[Method]:
    """Every method at every number of shots; `zero-shot`, `nearest` and `in-context` once.

    `knowledge` may be empty unless `needs_search`; `search` is how those methods find examples,
    `samples` is how many of one reply the choosing ones choose from: if nothing is said, as many as
    a search among the methods may ask for, or else 5. `rationales` is what `prompt_for` takes,
    `compressor`, `hyper` and `store` are those of `recipes.racc`. Raises `SettingError`.
    """
    check(names, shots)
    check_benchmark_fit(names, data)
    check_compressing(names, hyper, store, compressor)
    if samples is None:
        searches = not set(SEARCHED).isdisjoint(names)
        samples = most_calls(settings.generator, rollouts) if searches else SAMPLES
    planned: list[Method] = []
    for name in dict.fromkeys(names):
        asking = replace(settings, prompt=prompt_for(name, data, settings, rationales))
        if name == "zero-shot":
            pipeline = _pipeline(data, asking, None, 0, f"{name}, {data.name}")
            planned.append(Method(name, 0, _asking(pipeline)))
            continue
        retrieve = _retriever(name, data, knowledge, seed, search)
        controlled = _controlled(name, data, asking, seed)
        for k in _counts(name, shots, data):
            if name in VOTES:
                choose = partial(VOTES[name], multi_label=settings.multi_label)
                planned.append(Method(name, k, _voting(retrieve, k, choose)))
                continue
            tier = f"{name}, {k} shots, {data.name}"
            pipeline = _pipeline(data, controlled, retrieve, k, tier)
            if name in CHOOSING:
                pipeline = _sampling(pipeline, CHOOSING[name], samples, seed)
            if name in SEARCHED:
                pipeline = searched(
                    name, pipeline, controlled, shots=k, rollouts=rollouts, seed=seed
                )
            if name in BASELINES:
                pipeline = baseline(name, pipeline, settings.generator)
            if name in COMPRESSED:
                pipeline = compressed(
                    name, pipeline, data, settings.generator, compressor, hyper, store
                )
            planned.append(Method(name, k, _asking(pipeline)))
    return planned


def _counts(name: str, shots: Sequence[int], data: Benchmark) -> Iterable[int]:
    if name == "in-context":
        return (max_demonstrations(data),)
    return (1,) if name == NEAREST else dict.fromkeys(shots)


def default_methods(data: Benchmark) -> tuple[str, ...]:
    """Return `READING` for passages, `ANSWERING` for questions with their own choices, and
    `LABEL_METHODS` otherwise."""
    if _has_passages(data):
        return READING
    return ANSWERING if _has_own_choices(data) else LABEL_METHODS


def alone(data: Benchmark, names: Sequence[str]) -> Benchmark:
    """With its passages alone where that is all that the methods read, as they were taught: a known
    question that is found would be read without its answer."""
    reading = set(READ).intersection(names) and set(names) <= {"zero-shot", *READ}
    if not reading or not _has_passages(data):
        return data
    return replace(data, knowledge=tuple(filter(is_passage, data.knowledge)))


def needs_search(names: Sequence[str], data: Benchmark) -> bool:
    """Whether the knowledge base has to be filled, for searching or, without episodes, at all."""
    if set(names) <= {"zero-shot"}:
        return False
    searches = SEARCHING if names_passages(data.items) else {*SEARCHING, *READ}
    return not data.episode_of or not searches.isdisjoint(names)


def check(names: Sequence[str], shots: Sequence[int]) -> None:
    """Raises `SettingError` for what `plan` cannot do, before anything is loaded."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        similar = suggestion(unknown[0], METHODS) if unknown else ""
        raise SettingError(
            f"unknown method {', '.join(unknown) or '(none given)'}",
            hint=f"{similar}choose from {', '.join(METHODS)}",
        )
    if any(k < 1 for k in shots) or not shots:
        raise SettingError("shots must be positive numbers", hint="for example --shots 5,10,20")


def check_benchmark_fit(names: Sequence[str], data: Benchmark) -> None:
    """Raises `SettingError` for a method that this benchmark cannot have."""
    passages = _has_passages(data)
    told = [name for name in ("oracle", ORACLE) if name in names]
    if told and not names_passages(data.items):
        raise SettingError(
            f"{data.name} does not say which passage is right",
            hint=f"{' and '.join(told)} can be had for facts",
        )
    read = [name for name in READ if name in names]
    if read and not passages:
        raise SettingError(
            f"{data.name} has no passages, which {', '.join(read)} would read",
            hint="add some with --passages, or ask facts",
        )
    if read and not all(map(is_passage, data.knowledge)):
        raise SettingError(
            f"{', '.join(read)} would read the known questions of {data.name} beside its passages",
            hint="ask what shows examples in a command of its own; in Python `alone(data, names)`",
        )
    labelled = LABELLED.intersection(names)
    if passages and labelled:
        raise SettingError(
            f"{data.name} has passages without labels, which {' and '.join(labelled)} would count",
            hint=f"use {', '.join(READING)} or visual-rag",
        )
    if labelled and _has_own_choices(data):
        raise SettingError(
            f"the questions of {data.name} have no labels in common, which"
            f" {' and '.join(labelled)} would count",
            hint=f"use {', '.join(ANSWERING)}",
        )
    if "in-context" in names and not data.episode_of and len(data.knowledge) > MOST_IN_CONTEXT:
        raise SettingError(
            f"in-context would show all {len(data.knowledge)} examples to every item",
            hint=f"use --kb-per-class: it shows {MOST_IN_CONTEXT} at most",
        )


def _retriever(
    name: str, data: Benchmark, knowledge: KnowledgeBase, seed: int, search: RetrieverFactory
) -> Retriever:
    if name in SEARCHING or (name in READ and not names_passages(data.items)):
        return search(data, knowledge)
    kind = "oracle" if name in READ else name
    if kind == "oracle":
        right = {id: item.tags["passage"] for id, item in by_id(data.items).items()}
        told = {
            one: OracleRetriever(shelf, right, seed=seed)
            for one, shelf in episode_pools(data).items()
        }
        found = EpisodeRetriever(data.episode_of, told)
        return LateInteractionScorer(found) if name in READ else found
    make: dict[str, Callable[[LabelledPool], Retriever]] = {
        "random": lambda pool: UniformSampler(pool, seed=seed),
        "balanced": lambda pool: BalancedSampler(pool, seed=seed),
        "in-context": lambda pool: UniformSampler(pool, seed=seed),
    }
    inside = {episode: make[name](pool) for episode, pool in pools(data, knowledge).items()}
    return EpisodeRetriever(data.episode_of, inside)


def _controlled(name: str, data: Benchmark, settings: Classifier, seed: int) -> Classifier:
    """The settings of the method: those given, or with the prompt and the traces of a control."""
    others = {"swap-image": other_picture, "swap-question": other_question}
    if name not in others:
        return settings
    other = others[name](data, seed=seed)
    prompt = SwappedPrompter(settings.prompt or default_prompter(settings.generator), other)
    return replace(
        settings,
        prompt=prompt,
        record=settings.record and SwappedQueryRecorder(settings.record, other),
    )


def max_demonstrations(data: Benchmark) -> int:
    """How many examples may be shown to an item: all, or those of the largest episode."""
    sizes = Counter(data.episode_of.get(example.query.id or "", "") for example in data.knowledge)
    return max(sizes.values())


def _has_passages(data: Benchmark) -> bool:
    return any(map(is_passage, data.knowledge))


def _has_own_choices(data: Benchmark) -> bool:
    """An episode's items have theirs in common."""
    return not data.episode_of and any(item.query.choices for item in data.items)


def _pipeline(
    data: Benchmark,
    settings: Classifier,
    retrieve: Retriever | None,
    shots: int,
    tier: str,
) -> Pipeline:
    """`tier` is what the traces are found by."""
    route = FixedRouter(Tier(tier, settings.generator, shots))
    return replace(settings.pipeline(retrieve, shots), route=route, parse=data.parse)


def _sampling(
    pipeline: Pipeline, choose: Callable[[Sequence[Answer]], Answer], samples: int, seed: int
) -> Pipeline:
    sampling = replace(pipeline.sampling, n=samples, temperature=TEMPERATURE, seed=seed)
    return replace(pipeline, sampling=sampling, choose=choose)


def _asking(pipeline: Pipeline) -> Callable[[Query], Awaitable[Outcome]]:
    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return answer


def _voting(
    retrieve: Retriever, shots: int, choose: Callable[[Sequence[Candidate]], Answer]
) -> Callable[[Query], Awaitable[Outcome]]:
    async def answer(query: Query) -> Outcome:
        return Outcome(choose(await retrieve(query, shots)))

    return answer
