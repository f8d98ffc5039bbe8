"""Plan of a run: checked methods, each at its numbers of shots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, is_passage, names_passages
from bottega.evaluation.config import CUSTOM, RunConfig
from bottega.evaluation.methods.controls import swapped_prompter, swapped_recorder
from bottega.evaluation.methods.logistic import KnowledgeBaseLogistic
from bottega.evaluation.methods.prompts import (
    method_settings,
    methods_with_rationales,
    sample_count,
)
from bottega.evaluation.methods.retrieval import (
    EpisodeRetriever,
    LateInteractionScorer,
    RetrieverFactory,
    nearest_retriever,
    oracle_retriever,
    pools,
    scored_retriever,
)
from bottega.evaluation.methods.searchers import MethodContext
from bottega.evaluation.methods.specifications import (
    CHOICE_METHODS,
    COMPRESSION_METHODS,
    LABEL_METHODS,
    LOGREG,
    METHODS,
    NEEDS_GOLD_PASSAGES,
    PASSAGE_METHODS,
    SAMPLING_METHODS,
    SEARCH_METHODS,
    MethodSpec,
)
from bottega.evaluation.methods.votes import knn, with_means
from bottega.evaluation.outcomes import Method, MethodKey, Outcome, pipeline_method
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import suggestion
from bottega.pipeline import FixedRouter
from bottega.protocols import Retriever, Tier, turns_only
from bottega.recipes import Classifier, default_prompter
from bottega.recipes.cache_retrieval import BY_VECTORS
from bottega.recipes.racc import check_compressor_files
from bottega.reranking import check_depth
from bottega.retrieval import BalancedSampler, UniformSampler
from bottega.types import Query

MAX_IN_CONTEXT = 200
TREE_OPTIONS = ("--children", "--exploration", "--no-early-stop")
SEARCH_OPTIONS = ("--preset", "--rollouts", "--reward", "--alpha", "--fetch", "--variant")


def plan(
    config: RunConfig,
    data: Benchmark,
    knowledge: KnowledgeBase,
    settings: Classifier,
    *,
    search: RetrieverFactory = nearest_retriever,
    hyper: TransformersGenerator | None = None,
) -> list[Method]:
    """Return each method at each number of shots; `zero-shot`, `nearest`, `logreg` and
    `in-context` once.

    `knowledge` may be empty unless `needs_search`; `search` finds the examples of the methods that
    search it. Raises `SettingError`.
    """
    check_methods(config.methods, config.shots)
    check_benchmark_fit(config, data)
    check_compressor(config, hyper)
    context = MethodContext(
        data,
        settings.generator,
        config,
        samples=sample_count(config, settings.generator),
        hyper=hyper,
        knowledge=knowledge,
    )
    planned: list[Method] = []
    for name in dict.fromkeys(config.methods):
        spec = METHODS[name]
        if spec.retrieval == "vectors":
            planned.append(_logistic_method(data, knowledge, settings.multi_label, config.seed))
            continue
        asking = method_settings(name, data, settings, config)
        retrieve = _retriever(spec, data, knowledge, config.seed, search)
        swapped = _swapped(spec, data, asking, config.seed)
        for shots in _shots(spec, config.shots, data):
            context = replace(context, shots=shots)
            planned.append(_method(spec, context, swapped, retrieve))
    return planned


def method_keys(config: RunConfig, data: Benchmark) -> list[MethodKey]:
    """Return the keys of the methods of `plan`, in their order."""
    keys: list[MethodKey] = []
    for name in dict.fromkeys(config.methods):
        spec = METHODS[name]
        shots = (0,) if spec.retrieval == "vectors" else _shots(spec, config.shots, data)
        keys += [(name, count) for count in shots]
    return keys


def max_calls(config: RunConfig, data: Benchmark, settings: Classifier) -> int:
    """Return the maximum number of completions of a run, without drafts of its retrieval."""
    samples = sample_count(config, settings.generator)
    search = config.search.max_calls(settings.generator)
    calls = 0
    for name in dict.fromkeys(config.methods):
        spec = METHODS[name]
        if not spec.uses_model:
            continue
        for shots in _shots(spec, config.shots, data):
            if name in SEARCH_METHODS:
                calls += search
            elif name in SAMPLING_METHODS:
                calls += samples
            elif name == "candidates":
                calls += shots
            else:
                calls += 1
    return calls * len(data.items)


def default_methods(data: Benchmark, retrieve: str = "image") -> tuple[str, ...]:
    """Return the default methods: for passages, for questions with choices, or for labels."""
    if _has_passages(data):
        return PASSAGE_METHODS
    if _has_own_choices(data):
        return CHOICE_METHODS
    if _has_open_answers(data) or retrieve not in BY_VECTORS:
        return tuple(name for name in LABEL_METHODS if name != LOGREG)
    return LABEL_METHODS


def with_custom(names: Sequence[str], pipeline: str | None) -> Sequence[str]:
    """Add `custom` to the methods if its function is given. Raises `SettingError` without one."""
    if CUSTOM in names and pipeline is None:
        raise SettingError(f"{CUSTOM} needs a function", hint="set --pipeline MODULE:FUNCTION")
    return names if pipeline is None or CUSTOM in names else (*names, CUSTOM)


def passages_only(data: Benchmark, names: Sequence[str]) -> Benchmark:
    """Remove labelled questions from the knowledge base if all methods read passages alone.

    Compressors are trained on passages: they would read a labelled question without its answer.
    """
    specs = [METHODS[name] for name in names if name in METHODS]
    reads = any(spec.reads_passages for spec in specs)
    if not (reads and all(s.reads_passages or s.retrieval == "none" for s in specs)):
        return data
    if not _has_passages(data):
        return data
    return replace(data, knowledge=tuple(filter(is_passage, data.knowledge)))


def needs_search(names: Sequence[str], data: Benchmark) -> bool:
    """Return whether the knowledge base must be filled: to search it or, without episodes, to
    sample from it."""
    specs = [METHODS[name] for name in names if METHODS[name].retrieval != "none"]
    gold = names_passages(data.items)
    return bool(specs) and (
        not data.episode_of or any(spec.searches(data, names_passages=gold) for spec in specs)
    )


def check_methods(names: Sequence[str], shots: Sequence[int]) -> None:
    """Raise `SettingError` for unknown methods or invalid numbers of shots."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        similar = suggestion(unknown[0], METHODS) if unknown else ""
        raise SettingError(
            f"unknown method {', '.join(unknown) or '(none given)'}",
            hint=f"{similar}choose from {', '.join(METHODS)}",
        )
    if any(k < 1 for k in shots) or not shots:
        given = ",".join(map(str, shots)) or "none"
        raise SettingError(
            f"shots must be positive numbers, got {given}", hint="set e.g. --shots 5,10,20"
        )


def check_benchmark_fit(config: RunConfig, data: Benchmark) -> None:
    """Raise `SettingError` for a method that this benchmark, its retrieval or a number of shots
    does not support."""
    names = config.methods
    for name in (name for name in names if name in SEARCH_METHODS):
        check_depth(max(_shots(METHODS[name], config.shots, data)))
    gold = [name for name in NEEDS_GOLD_PASSAGES if name in names]
    if gold and not names_passages(data.items):
        raise SettingError(
            f"{' and '.join(gold)} {_need(gold)} the gold passage of each item,"
            f" which {data.name} lacks",
            hint="remove them, or use facts",
        )
    passages = [name for name in names if METHODS[name].reads_passages]
    if passages and not _has_passages(data):
        raise SettingError(
            f"{', '.join(passages)} {_need(passages)} passages, which {data.name} lacks",
            hint="add some with --passages, or use facts",
        )
    if passages and not all(map(is_passage, data.knowledge)):
        raise SettingError(
            f"{', '.join(passages)} read passages only, got labelled questions of {data.name} too",
            hint="run methods that show examples in a command of their own; in Python use"
            " passages_only(data, names)",
        )
    _check_labels([name for name in METHODS if name in names and METHODS[name].needs_labels], data)
    if LOGREG in names:
        _check_label_set(data, config.retrieve)
    if "in-context" in names and not data.episode_of and len(data.knowledge) > MAX_IN_CONTEXT:
        raise SettingError(
            f"in-context shows at most {MAX_IN_CONTEXT} examples, got {len(data.knowledge)}",
            hint="reduce them with --kb-per-class",
        )


def _need(names: Sequence[str]) -> str:
    return "needs" if len(names) == 1 else "need"


def _check_labels(names: Sequence[str], data: Benchmark) -> None:
    if names and _has_passages(data):
        raise SettingError(
            f"{' and '.join(names)} {_need(names)} labels, got passages in {data.name}",
            hint=f"use {', '.join(PASSAGE_METHODS)} or visual-rag",
        )
    if names and _has_own_choices(data):
        raise SettingError(
            f"{' and '.join(names)} {_need(names)} common labels, got choices of each question in"
            f" {data.name}",
            hint=f"use {', '.join(CHOICE_METHODS)}",
        )


def _check_label_set(data: Benchmark, retrieve: str) -> None:
    if _has_open_answers(data):
        raise SettingError(
            f"{LOGREG} needs a set of labels, got open answers in {data.name}",
            hint=f"remove {LOGREG}; knn and vote choose among the retrieved answers",
        )
    if retrieve not in BY_VECTORS:
        raise SettingError(
            f"{LOGREG} needs one vector for each example, got retrieval by {retrieve}",
            hint=f"set --retrieve to {', '.join(BY_VECTORS[:-1])} or {BY_VECTORS[-1]}, or remove"
            f" {LOGREG}",
        )


def check_compressor(config: RunConfig, hyper: object | None = None) -> None:
    """Raise `SettingError` for options that no method uses, `LoadError` and `StoreError` for
    folders without a compressor or a store."""
    options = {"--hyper": hyper, "--store": config.store, "--compressor": config.compressor}
    given = [name for name, value in options.items() if value is not None]
    if given and not set(COMPRESSION_METHODS).intersection(config.methods):
        raise SettingError(
            f"{given[0]} needs a method that compresses passages, got"
            f" {', '.join(config.methods) or 'the default methods'}",
            hint=f"remove it, or add {', '.join(COMPRESSION_METHODS)}",
        )
    check_compressor_files(config.compressor, config.store)


def check_method_options(
    given: Collection[str], config: RunConfig, data: Benchmark, settings: Classifier
) -> None:
    """Raise `SettingError` for a given option that has no effect on the methods of the run, and for
    a reward that needs rationales without any."""
    uses = {
        **dict.fromkeys(TREE_OPTIONS, ("rcts",)),
        **dict.fromkeys(SEARCH_OPTIONS, SEARCH_METHODS),
        "--samples": SAMPLING_METHODS,
    }
    for option in given:
        if set(uses[option]).isdisjoint(config.methods):
            raise SettingError(
                f"{option} needs {' or '.join(uses[option])}, got {', '.join(config.methods)}",
                hint=f"remove {option}, or add {uses[option][0]} to --methods",
            )
    reward = config.search.reward_for(settings.generator)
    if "--reward" in given and reward in ("self", "both") and turns_only(settings.generator):
        explained = methods_with_rationales(config.methods, data, settings, config.rationales)
        # A model of short turns writes a rationale only if its demonstrations show some.
        if set(SEARCH_METHODS).isdisjoint(explained):
            raise SettingError(
                f"the reward {reward} needs rationales, which {settings.generator.name} writes only"
                f" after demonstrations with rationales; those of {data.name} show none",
                hint="set --reward ensemble or mutual",
            )
    if "--alpha" in given:
        config.search.check_alpha(settings.generator)
    if "--variant" in given and reward == "ensemble" and "rcts" not in config.methods:
        raise SettingError(
            "--variant changes only rcts and the rewards self, mutual and both, got"
            f" {', '.join(config.methods)} with the reward ensemble",
            hint="remove --variant, or set --reward mutual",
        )


def max_demonstrations(data: Benchmark) -> int:
    """Return how many examples an item may be shown: all, or those of the largest episode."""
    sizes = Counter(data.episode_of.get(example.query.id or "", "") for example in data.knowledge)
    return max(sizes.values())


def _shots(spec: MethodSpec, shots: Sequence[int], data: Benchmark) -> Iterable[int]:
    if spec.retrieval == "everything":
        return (max_demonstrations(data),)
    return dict.fromkeys(shots) if spec.shots is None else (spec.shots,)


def _method(
    spec: MethodSpec, context: MethodContext, settings: Classifier, retrieve: Retriever | None
) -> Method:
    shots, data = context.shots, context.data
    if spec.vote is not None:
        assert retrieve is not None
        counted = context.knowledge if spec.vote is knn else None
        return _vote_method(spec, retrieve, shots, settings.multi_label, counted)
    if spec.retrieval != "search":  # other retrieval gives no similarity scores
        settings = replace(settings, guard=None, rerank=None)
    # The tier names the method in traces.
    tier = f"{spec.name}, {shots} shots, {data.name}" if shots else f"{spec.name}, {data.name}"
    route = FixedRouter(Tier(tier, settings.generator, shots))
    pipeline = replace(settings.pipeline(retrieve, shots), route=route, parse=data.parse)
    if spec.build is not None:
        pipeline = spec.build(pipeline, context)
    return pipeline_method(spec.name, pipeline, shots)


def _vote_method(
    spec: MethodSpec,
    retrieve: Retriever,
    shots: int,
    multi_label: bool,
    means_of: KnowledgeBase | None,
) -> Method:
    """Return the vote of the retrieved examples and the class means of `means_of`."""
    assert spec.vote is not None
    vote = partial(spec.vote, multi_label=multi_label)

    async def answer(query: Query) -> Outcome:
        found = await retrieve(query, shots)
        if means_of is None or means_of.fitted is None:
            return Outcome(vote(found))
        found = with_means(found, await asyncio.to_thread(means_of.class_means, query))
        return Outcome(vote(found, exponent=means_of.fitted.exponent))

    return Method(spec.name, shots, answer)


def _logistic_method(
    data: Benchmark, knowledge: KnowledgeBase, multi_label: bool, seed: int
) -> Method:
    fit = partial(KnowledgeBaseLogistic, knowledge, multi_label=multi_label, seed=seed)
    by_episode = {
        episode: fit(within=knowledge.ids(tags={"episode": episode}) if episode else None)
        for episode in dict.fromkeys(data.episode_of.values()) or [""]
    }

    async def answer(query: Query) -> Outcome:
        episode = data.episode_of.get(query.id or "", "")
        return Outcome(await asyncio.to_thread(by_episode[episode].answer, query))

    return Method(LOGREG, 0, answer)


def _retriever(
    spec: MethodSpec,
    data: Benchmark,
    knowledge: KnowledgeBase,
    seed: int,
    search: RetrieverFactory,
) -> Retriever | None:
    if spec.retrieval == "none":
        return None
    if spec.searches(data, names_passages=names_passages(data.items)):
        return search(data, knowledge)
    if spec.retrieval == "oracle":
        return oracle_retriever(data, seed=seed)
    if spec.reads_passages and data.passage_scores:
        return scored_retriever(data, seed=seed)
    if spec.reads_passages:
        return LateInteractionScorer(oracle_retriever(data, seed=seed))
    sampler: Callable[..., Retriever] = UniformSampler
    if spec.retrieval == "balanced":
        sampler = BalancedSampler
    by_episode: dict[str, Retriever] = {
        episode: sampler(pool, seed=seed) for episode, pool in pools(data, knowledge).items()
    }
    return EpisodeRetriever(data.episode_of, by_episode)


def _swapped(spec: MethodSpec, data: Benchmark, settings: Classifier, seed: int) -> Classifier:
    """Return the settings with the prompt and the recorder of a control."""
    if spec.swap is None:
        return settings
    swap = spec.swap(data, seed=seed)
    prompt = swapped_prompter(settings.prompt or default_prompter(settings.generator), swap)
    record = settings.record and swapped_recorder(settings.record, swap)
    return replace(settings, prompt=prompt, record=record)


def _has_passages(data: Benchmark) -> bool:
    return any(map(is_passage, data.knowledge))


def _has_open_answers(data: Benchmark) -> bool:
    return not data.labels and not all(item.query.choices for item in data.items)


def _has_own_choices(data: Benchmark) -> bool:
    """Return whether questions have their own choices; the items of an episode share theirs."""
    return not data.episode_of and any(item.query.choices for item in data.items)


def check_rerank(rerank: str, methods: Collection[str]) -> None:
    """Raise `SettingError` for a re-ranker that none of the methods uses."""
    shown = [name for name in methods if METHODS[name].shows_demonstrations]
    if rerank != "none" and methods and not shown:
        raise SettingError(
            f"--rerank {rerank} has no effect on --methods {','.join(methods)}",
            hint="remove it, or add visual-rag",
        )
