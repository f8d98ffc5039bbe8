"""Retrieval inside an item's episode. A benchmark without episodes is one episode, named ""."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bottega.errors import NotFoundError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.labels import labels_of
from bottega.exclusion import DESCRIPTIONS, Exclude
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Retriever
from bottega.retrieval import DenseRetriever, LabelledPool
from bottega.types import Candidate, Example, Query

# Demonstrations never share an image with the item: the answer to another question about the same
# image may give the item's answer away.
EXCLUDE: Exclude = "same-image"
EXCLUSION_RULE = f"Demonstrations exclude {DESCRIPTIONS[EXCLUDE]}."


class ExamplePool:
    """Examples in memory, as the random retrievers see a knowledge base."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = {
            example.query.id or f"nameless {place}": example
            for place, example in enumerate(examples)
        }

    def ids(self) -> Sequence[str]:
        return list(self._examples)

    def ids_by_label(self) -> Mapping[str, Sequence[str]]:
        by_label: defaultdict[str, list[str]] = defaultdict(list)
        for id, example in self._examples.items():
            for label in labels_of(example):
                by_label[label].append(id)
        return by_label

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        for id in ids:
            if id not in self._examples:
                raise NotFoundError(
                    f"there is no passage {id}", hint="look at the tag passage of the questions"
                )
        return [self._examples[id] for id in ids]


class EpisodeRetriever:
    """Leaves each query to the retriever of its episode."""

    def __init__(self, episode_of: Mapping[str, str], retrievers: Mapping[str, Retriever]) -> None:
        self._episode_of = episode_of
        self._retrievers = retrievers

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await self._retrievers[self._episode_of.get(query.id or "", "")](query, k)


class OracleRetriever:
    """The passage that answers the query among k - 1 random others, in a random order.

    Both are seeded by the query. `passage_of` maps a query's id to its passage's: retrieval that
    knows the answer, so that what remains is reading.
    """

    def __init__(self, pool: LabelledPool, passage_of: Mapping[str, str], *, seed: int) -> None:
        self._pool = pool
        self._passage_of = passage_of
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        right = self._passage_of[str(query.id)]
        rng = random.Random(f"{self._seed}:{query.id}")
        others = [id for id in self._pool.ids() if id != right]
        chosen = [right, *rng.sample(others, min(k - 1, len(others)))]
        rng.shuffle(chosen)
        return [Candidate(example, 0.0) for example in self._pool.get_many(chosen)]


def pools(data: Benchmark, knowledge: KnowledgeBase) -> dict[str, LabelledPool]:
    """What may be shown in each episode."""
    return {**episode_pools(data)} if data.episode_of else {"": knowledge}


def episode_pools(data: Benchmark) -> dict[str, ExamplePool]:
    """The same by the ids that the benchmark itself knows: a knowledge base has its own."""
    members: defaultdict[str, list[Example]] = defaultdict(list)
    for example in data.knowledge:
        members[data.episode_of.get(str(example.query.id), "")].append(example)
    return {episode: ExamplePool(examples) for episode, examples in members.items()}


def nearest(
    data: Benchmark, knowledge: KnowledgeBase, search: Callable[..., list[Candidate]] | None = None
) -> Retriever:
    """In the whole knowledge base, or among the query's episode: by its own exact search, or by
    another one that takes `within`."""
    search = partial(search or knowledge.search, exclude=EXCLUDE)
    if not data.episode_of:
        return DenseRetriever(search)
    retrievers = {
        episode: DenseRetriever(partial(search, within=knowledge.ids(tags={"episode": episode})))
        for episode in dict.fromkeys(data.episode_of.values())
    }
    return EpisodeRetriever(data.episode_of, retrievers)
