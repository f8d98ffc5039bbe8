"""Pipelines of methods that search, compress or compare candidates before they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import SAMPLES, RunConfig
from bottega.evaluation.methods.retrieval import RescoredRetriever, SwappedRetriever, gold_passages
from bottega.evaluation.metrics.metric import Metric
from bottega.generation import OpenAIGenerator, TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import imported, own_code_error
from bottega.parsing import equal_answers
from bottega.pipeline import Pipeline
from bottega.prompting import ContinuationPrompter
from bottega.protocols import Generator, Reranker, Retriever, Searcher, turns_only
from bottega.recipes import kv_reuse_searcher
from bottega.recipes.racc import bundled_compressor_for, compression_searcher
from bottega.recipes.rcts import ENSEMBLE, PROBES, conclusion_prompter
from bottega.reranking import (
    DemonstrationOrder,
    EnsembleReward,
    FlatSearch,
    JointChoiceSearch,
    MutualReward,
    RewardFunction,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
)
from bottega.reranking.flat_search import Sequences
from bottega.types import Answer, Candidate, Query, Sampling, SearchResult

REWARD_TEMPERATURE = 0.8
# Of Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models (2023).
TEMPERATURE = 0.7
GOLD_SCORE = 1000.0  # above all other scores, on any scale


@dataclass(frozen=True)
class MethodContext:
    """Parts from which a method builds its pipeline. `hyper` compresses passages for `racc`."""

    data: Benchmark
    generator: Generator
    config: RunConfig
    shots: int = 0
    samples: int = SAMPLES
    hyper: TransformersGenerator | None = None
    knowledge: KnowledgeBase | None = None


PipelineBuilder = Callable[[Pipeline, MethodContext], Pipeline]


def custom(pipeline: Pipeline, context: MethodContext) -> Pipeline:
    """Return what the user's function makes of the pipeline and the examples. Raises
    `SettingError`."""
    target = context.config.pipeline or ""
    make = imported(target)
    try:
        found = make(pipeline, context.knowledge)
    except Exception as error:
        raise own_code_error(target, error) from error
    if not isinstance(found, Pipeline):
        raise SettingError(
            f"{target} returned no Pipeline",
            hint="write def NAME(pipeline, examples): return"
            " dataclasses.replace(pipeline, retrieve=...)",
        )
    return found


def tree_search(pipeline: Pipeline, context: MethodContext) -> Pipeline:
    """Replace the reranker by RCTS's tree search."""
    config = context.config.search
    search = TreeSearch(
        context.generator,
        prompt=pipeline.prompt,
        parse=pipeline.parse,
        reward=_reward(pipeline, context),
        rollouts=config.rollouts,
        children=config.children,
        exploration=config.exploration,
        variant=config.variant,
        early_stop=config.early_stop,
        sampling=pipeline.sampling,
        agree=equal_answers,
        seed=context.config.seed,
        max_calls=config.max_calls(context.generator),
        zero_shot_prompt=context.data.prompt if shows_rationales(pipeline, context) else None,
    )
    return replace(pipeline, fetch=max(config.fetch, context.shots), search=search)


def shows_rationales(pipeline: Pipeline, context: MethodContext) -> bool:
    """Return whether the pipeline has the benchmark's prompt with rationales."""
    own = context.data.rationale_prompt
    return own is not None and pipeline.prompt is own


def reward_metric(data: Benchmark, config: RunConfig) -> Metric | None:
    """Return the metric of the mutual reward; None if the examples show other answers than those of
    its annotators."""
    return None if config.answers_from or config.label_noise else data.reward_metric


def flat_search(sequences: Sequences) -> PipelineBuilder:
    """Return a builder of the search without a tree, with RCTS's reward, branches and calls.

    "nearest" samples several answers with the nearest examples, "random" answers with random
    sequences, "similar" with the nearest and with sequences drawn by score (eq. 6).
    """

    def build(pipeline: Pipeline, context: MethodContext) -> Pipeline:
        config, sampling = context.config.search, pipeline.sampling
        if sequences == "nearest":
            sampling = replace(sampling, temperature=TEMPERATURE)
        search = FlatSearch(
            context.generator,
            prompt=pipeline.prompt,
            parse=pipeline.parse,
            reward=_reward(pipeline, context),
            sequences=sequences,
            branches=config.rollouts,
            sampling=sampling,
            seed=context.config.seed,
            max_calls=config.max_calls(context.generator),
            order=cast(DemonstrationOrder, context.config.order or "nearest-last"),
        )
        return replace(pipeline, fetch=max(config.fetch, context.shots), search=search)

    return build


def _reward(pipeline: Pipeline, context: MethodContext) -> RewardFunction:
    """Return the reward of the settings: eq. 7, 8, 9, or an `EnsembleReward`."""
    config, generator = context.config.search, context.generator
    prompt, parse = pipeline.prompt, pipeline.parse
    name = config.reward_for(generator)
    if name == "ensemble":
        return EnsembleReward(
            prompt,
            parse,
            shots=context.shots,
            n=ENSEMBLE,
            sampling=pipeline.sampling,
            agree=equal_answers,
            seed=context.config.seed,
        )
    conclude = ContinuationPrompter(prompt) if turns_only(generator) else conclusion_prompter(parse)
    sampling = Sampling(REWARD_TEMPERATURE, pipeline.sampling.max_tokens)
    own = SelfConsistencyReward(
        conclude, parse, n=PROBES, sampling=sampling, agree=equal_answers, variant=config.variant
    )
    metric = reward_metric(context.data, context.config)
    mutual = MutualReward(
        prompt,
        parse,
        n=PROBES,
        sampling=sampling,
        agree=equal_answers,
        variant=config.variant,
        score=None if metric is None else metric.score,
    )
    parts: dict[str, RewardFunction] = {"self": own, "mutual": mutual}
    return parts.get(name) or WeightedReward(own, mutual, config.alpha)


def sampling_choice(choose: Callable[[Sequence[Answer]], Answer]) -> PipelineBuilder:
    """Return a builder of a pipeline that chooses among several samples of one reply."""

    def build(pipeline: Pipeline, context: MethodContext) -> Pipeline:
        seed, n = context.config.seed, context.samples
        sampling = replace(pipeline.sampling, n=n, temperature=TEMPERATURE, seed=seed)
        return replace(pipeline, sampling=sampling, choose=choose)

    return build


def joint_choice(pipeline: Pipeline, context: MethodContext) -> Pipeline:
    """Answer from each passage alone; choose the answer with the best joint probability."""
    generator = context.generator
    if isinstance(generator, OpenAIGenerator):
        generator = generator.with_extra_body({"logprobs": True})  # off by default
    search = JointChoiceSearch(
        generator, prompt=pipeline.prompt, parse=pipeline.parse, sampling=pipeline.sampling
    )
    return replace(pipeline, search=search)


@dataclass(frozen=True)
class RerankedSearch:
    """Searcher over passages in the order of a reranker, which is the order that `concat` shows."""

    rerank: Reranker
    within: Searcher

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        return await self.within.search(query, await self.rerank(query, candidates, k), k)


def key_value_reuse(pipeline: Pipeline, context: MethodContext) -> Pipeline:
    """Put the keys and values of separately read passages before the question."""
    search = kv_reuse_searcher(
        context.generator,
        prompt=pipeline.prompt,
        parse=pipeline.parse,
        sampling=pipeline.sampling,
    )
    if pipeline.rerank is None:
        return replace(pipeline, search=search)
    return replace(pipeline, search=RerankedSearch(pipeline.rerank, search))


def compressed(
    control: Callable[[Retriever, Benchmark], Retriever] = lambda retrieve, data: retrieve,
) -> PipelineBuilder:
    """Return a builder of a pipeline that compresses passages (RACC) instead of showing them.

    `control` changes the retriever. The builder raises `SettingError`.
    """

    def build(pipeline: Pipeline, context: MethodContext) -> Pipeline:
        config, retrieve = context.config, pipeline.retrieve
        assert retrieve is not None
        search = compression_searcher(
            config.compressor or bundled_compressor_for(context.generator),
            context.generator,
            hyper=context.hyper,
            store=config.store,
            prompt=pipeline.prompt,
            parse=pipeline.parse,
            sampling=pipeline.sampling,
        )
        return replace(pipeline, retrieve=control(retrieve, context.data), search=search)

    return build


def gold_scores(retrieve: Retriever, data: Benchmark) -> Retriever:
    """Score the gold passage above all others (`racc-oracle`)."""
    gold = gold_passages(data)
    return RescoredRetriever(
        retrieve,
        lambda query, one: GOLD_SCORE * (str(one.example.query.id) == gold[str(query.id)]),
    )


def equal_scores(retrieve: Retriever, data: Benchmark) -> Retriever:
    """Score all passages equally (`racc-flat`)."""
    return RescoredRetriever(retrieve, lambda query, one: 0.0)


# Retrieves the passages of another item (`racc-swapped`).
other_passages = SwappedRetriever
