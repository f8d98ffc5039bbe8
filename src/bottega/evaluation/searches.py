"""RCTS among the methods, and what it has to beat with as many answers of the model."""

from __future__ import annotations

from dataclasses import replace

from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Searcher
from bottega.recipes import Classification, heuristic
from bottega.reranking import FlatSearch, TreeSearch

TREE, RANDOM, BEST = "rcts", "rcts-random", "rcts-best-of-n"
SEARCHED = (TREE, RANDOM, BEST)
ROLLOUTS = 10
FETCH = 20
SELF, MUTUAL = 5, 5
# Of Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models (2023).
TEMPERATURE = 0.7


def most_calls(generator: Generator, rollouts: int) -> int:
    """Completions that a search may ask for to answer one question: the zero-shot answer, and for
    each branch its answer, the known questions, and the question again where a model gives
    rationales."""
    reasons = not getattr(generator, "turns_only", False)
    return 1 + rollouts * (1 + MUTUAL + (SELF if reasons else 0))


def searched(
    name: str, pipeline: Pipeline, settings: Classification, *, rollouts: int, seed: int
) -> Pipeline:
    """The pipeline with one of `SEARCHED` in place of its re-ranker: all have the same reward, as
    many branches and the same limit of completions."""
    return replace(pipeline, fetch=FETCH, search=_search(name, pipeline, settings, rollouts, seed))


def _search(
    name: str, pipeline: Pipeline, settings: Classification, rollouts: int, seed: int
) -> Searcher:
    generator, prompt, parse = settings.generator, pipeline.prompt, pipeline.parse
    reward = heuristic(prompt, parse, sampling=pipeline.sampling)
    most = most_calls(generator, rollouts)
    if name == TREE:
        return TreeSearch(
            generator,
            prompt=prompt,
            parse=parse,
            reward=reward,
            rollouts=rollouts,
            sampling=pipeline.sampling,
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
