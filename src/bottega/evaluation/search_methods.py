"""RCTS among the methods, and what it has to beat with as many answers of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.episodes import EXCLUDE, EpisodeRetriever, nearest
from bottega.evaluation.memo import CachingEmbedder, CachingTokenEmbedder
from bottega.knowledge import (
    KnowledgeBase,
    LateInteractionIndex,
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
    View,
)
from bottega.knowledge.views import DEFAULT
from bottega.parsing import same_answer
from bottega.pipeline import Pipeline
from bottega.protocols import (
    Embedder,
    Generator,
    MultiVectorEmbedder,
    Retriever,
    Searcher,
    Vectors,
    turns_only,
)
from bottega.recipes import Classifier, default_reward
from bottega.reranking import EnsembleReward, FlatSearch, RewardFunction, TreeSearch
from bottega.retrieval import (
    BM25Retriever,
    HashtagRetriever,
    HashtagTree,
    KeywordRetriever,
    LeaveOneOutGroupCount,
    StaticExamples,
    TfidfKeywordExtractor,
    keyword_query,
)
from bottega.types import Example, Query

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
    settings: Classifier,
    *,
    shots: int,
    rollouts: int,
    seed: int,
) -> Pipeline:
    """The pipeline with one of `SEARCHED` in place of its re-ranker: all have the same reward, as
    many branches and the same limit of completions. The reward is the paper's (eq. 9), and an
    `EnsembleReward` for a model that knows brief turns alone and gives no reasons."""
    search = _search(name, pipeline, settings, shots, rollouts, seed)
    return replace(pipeline, fetch=max(FETCH, shots), search=search)


def _search(
    name: str,
    pipeline: Pipeline,
    settings: Classifier,
    shots: int,
    rollouts: int,
    seed: int,
) -> Searcher:
    generator, prompt, parse = settings.generator, pipeline.prompt, pipeline.parse
    reward: RewardFunction = default_reward(prompt, parse, sampling=pipeline.sampling)
    if turns_only(generator):
        reward = EnsembleReward(
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


RetrieverFactory = Callable[[Benchmark, KnowledgeBase], Retriever]
BY_VECTORS = ("image", "text", "dual")
RETRIEVE = (*BY_VECTORS, "hybrid", "keywords", "bm25", "hashtag")
TOKENS_AT_ONCE = 256


def searching(
    retrieve: str,
    embed: Embedder | None = None,
    *,
    tokens: MultiVectorEmbedder | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RetrieverFactory:
    """One of `RETRIEVE` as a retriever over a benchmark. `embed` is the knowledge base's own,
    `tokens` those of `hybrid`, the bundled model's if not given.

    `progress` is told how many examples were embedded since it was last told, where that takes
    long: for `hybrid`.
    """
    if retrieve in BY_VECTORS:
        return nearest
    if retrieve == "hybrid":
        made = cache(partial(_token_index, tokens=tokens, progress=progress))
        return partial(_by_tokens, index=made)
    if retrieve == "keywords":
        return _by_keywords
    if retrieve == "bm25":
        return _by_words
    if retrieve == "hashtag" and embed is not None:
        return partial(_by_hashtags, embed=embed, seed=seed)
    raise SettingError(f"cannot retrieve by {retrieve!r}", hint=f"use {', '.join(RETRIEVE)}")


def stored(retrieve: str, embed: Embedder) -> dict[str, View]:
    """What the knowledge base of a run keeps of an example. By keywords those of the response,
    where the example has them; a question is cut when it is asked (Cache-of-Thought, 4.3.1)."""
    return {DEFAULT: View(embed, keyword_query if retrieve == "keywords" else None)}


class Part:
    """Some of a knowledge base's examples."""

    def __init__(self, knowledge: KnowledgeBase, ids: Sequence[str]) -> None:
        self._knowledge = knowledge
        self._ids = ids

    def ids(self) -> Sequence[str]:
        return self._ids

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return self._knowledge.get_many(ids)


def _by_tokens(
    data: Benchmark,
    knowledge: KnowledgeBase,
    *,
    index: Callable[[KnowledgeBase], LateInteractionIndex],
) -> Retriever:
    """Late interaction, exact."""
    late = index(knowledge)  # one for all methods of the run
    late.refresh()
    return nearest(data, knowledge, partial(late.search, exact=True))


def _token_index(
    knowledge: KnowledgeBase,
    *,
    tokens: MultiVectorEmbedder | None = None,
    progress: Callable[[int], None] | None = None,
) -> LateInteractionIndex:
    if tokens is None:
        tokens = TowerTokenEmbedder(TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled())
    return LateInteractionIndex(
        knowledge, CachingTokenEmbedder(tokens, progress), batch_size=TOKENS_AT_ONCE
    )


def _by_keywords(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    """The question's keywords in its place; common are those that the known questions share."""
    terms = TfidfKeywordExtractor((example.query.text for example in data.knowledge), longest=1)
    return KeywordRetriever(nearest(data, knowledge), terms)


def _by_words(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    return _in_parts(
        data, knowledge, lambda part: BM25Retriever(StaticExamples(part), exclude=EXCLUDE)
    )


def _by_hashtags(
    data: Benchmark, knowledge: KnowledgeBase, *, embed: Embedder, seed: int
) -> Retriever:
    """Groups of the questions' words, fitted before the first question is asked; inside a group
    the order is the knowledge base's own."""
    words = CachingEmbedder(TokenEmbedder.bundled())

    def make(part: Part) -> Retriever:
        count = LeaveOneOutGroupCount(
            _vectors(part, embed), _vectors(part, words, _said), seed=seed
        )
        tree = HashtagTree(count, seed=seed)
        changes = StaticExamples(part).changes
        search = partial(knowledge.search, exclude=EXCLUDE)
        retrieve = HashtagRetriever(changes, _vectors(part, words), words, search, tree)
        retrieve.build()
        return retrieve

    return _in_parts(data, knowledge, make)


def _in_parts(
    data: Benchmark, knowledge: KnowledgeBase, make: Callable[[Part], Retriever]
) -> Retriever:
    """One retriever an episode, each over its own examples."""
    if not data.episode_of:
        return make(Part(knowledge, knowledge.ids()))
    members: defaultdict[str, list[str]] = defaultdict(list)
    for example in knowledge:
        members[example.tags["episode"]].append(str(example.id))
    inside = {episode: make(Part(knowledge, ids)) for episode, ids in members.items()}
    return EpisodeRetriever(data.episode_of, inside)


def _vectors(
    part: Part,
    embed: Embedder,
    to_query: Callable[[Example], Query] = lambda example: example.query,
) -> Callable[[Sequence[str]], Vectors]:
    return lambda ids: embed.embed([to_query(example) for example in part.get_many(ids)])


def _said(example: Example) -> Query:
    return Query(example.answer or example.query.text)
