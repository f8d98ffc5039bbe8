"""RCTS among the methods, and what it has to beat with as many answers of the model."""

from __future__ import annotations

from dataclasses import replace

from bottega.parsing import same_answer
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Searcher, turns_only
from bottega.recipes import Classification, heuristic
from bottega.reranking import Ensemble, FlatSearch, Reward, TreeSearch

TREE, RANDOM, BEST = "rcts", "rcts-random", "rcts-best-of-n"
SEARCHED = (TREE, RANDOM, BEST)
ROLLOUTS = 10
FETCH = 20
SELF, MUTUAL, ENSEMBLE = 5, 5, 15
# Of Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models (2023).
TEMPERATURE = 0.7


def most_calls(generator: Generator, rollouts: int) -> int:
    """Completions that a search may ask for to answer one question: the zero-shot answer, each
    branch's answer, and what its reward asks."""
    if turns_only(generator):
        return 1 + rollouts + ENSEMBLE
    return 1 + rollouts * (1 + SELF + MUTUAL)


def searched(
    name: str,
    pipeline: Pipeline,
    settings: Classification,
    *,
    shots: int,
    rollouts: int,
    seed: int,
) -> Pipeline:
    """The pipeline with one of `SEARCHED` in place of its re-ranker: all have the same reward, as
    many branches and the same limit of completions. The reward is the paper's (eq. 9), and an
    `Ensemble` for a model that knows brief turns alone and gives no reasons."""
    search = _search(name, pipeline, settings, shots, rollouts, seed)
    return replace(pipeline, fetch=max(FETCH, shots), search=search)


def _search(
    name: str, pipeline: Pipeline, settings: Classification, shots: int, rollouts: int, seed: int
) -> Searcher:
    generator, prompt, parse = settings.generator, pipeline.prompt, pipeline.parse
    reward: Reward = heuristic(prompt, parse, sampling=pipeline.sampling)
    if turns_only(generator):
        reward = Ensemble(
            prompt,
            parse,
            shots=shots,
            n=ENSEMBLE,
            sampling=pipeline.sampling,
            agree=same_answer,
            seed=seed,
        )
    most = most_calls(generator, rollouts)
    if name == TREE:
        return TreeSearch(
            generator,
            prompt=prompt,
            parse=parse,
            reward=reward,
            rollouts=rollouts,
            sampling=pipeline.sampling,
            agree=same_answer,
            seed=seed,
            most_calls=most,
        )
    sampling = pipeline.sampling
    if name == BEST:
        sampling = replace(sampling, temperature=TEMPERATURE)
    return FlatSearch(
        generator,
        prompt=prompt,
        parse=parse,
        reward=reward,
        sequences="random" if name == RANDOM else "nearest",
        branches=rollouts,
        sampling=sampling,
        seed=seed,
        most_calls=most,
    )
