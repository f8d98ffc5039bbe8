"""Random baselines: uniform and label-balanced samples of the examples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import chain

from bottega._util.identity import is_excluded, query_key
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError
from bottega.retrieval.ports import LabelledPool
from bottega.types import Candidate, Example, Query


class UniformSampler:
    """Retriever that samples k examples uniformly without replacement (many-shot ICL). The score of
    each is 0.

    The sample depends only on `seed` and the query, not on concurrency or query order. The ids are
    read once, at construction; examples deleted later are left out.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._ids = _not_empty(pool.ids())
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = _query_rng(query, self._seed)
        order = rng.sample(self._ids, len(self._ids))
        return await asyncio.to_thread(_take, self._pool, order, query, k)


class BalancedSampler:
    """Retriever that samples k examples with equal label counts (up to one), in random order.

    If k is less than the number of labels, k different labels are sampled. Seeded like
    `UniformSampler`.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._by_label = {label: list(ids) for label, ids in pool.ids_by_label().items()}
        _not_empty(list(self._by_label))
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = _query_rng(query, self._seed)
        found = await asyncio.to_thread(_take, self._pool, self._rounds(rng), query, k)
        rng.shuffle(found)
        return found

    def _rounds(self, rng: random.Random) -> list[str]:
        """Return one id of every label, then a second of every label, and so on; each id once."""
        labels = rng.sample(list(self._by_label), len(self._by_label))
        columns = [
            rng.sample(self._by_label[label], len(self._by_label[label])) for label in labels
        ]
        depth = max(map(len, columns))
        rounds = ([column[i] for column in columns if i < len(column)] for i in range(depth))
        return list(dict.fromkeys(chain.from_iterable(rounds)))


def _query_rng(query: Query, seed: int) -> random.Random:
    # Published samples for queries without images depend on this text, which has no last colon
    # there; that of `_util.identity` has one.
    return random.Random(":".join((str(seed), *query_key(query))))


def _take(pool: LabelledPool, order: Sequence[str], query: Query, k: int) -> list[Candidate]:
    """Return the first k of `order` without the query itself and deleted ids, k at a time."""
    if k <= 0:
        return []
    taken: list[Candidate] = []
    for start in range(0, len(order), k):
        for example in _present(pool, order[start : start + k]):
            if not is_excluded(query, example):
                taken.append(Candidate(example, 0.0))
        if len(taken) >= k:
            break
    return taken[:k]


def _present(pool: LabelledPool, ids: Sequence[str]) -> list[Example]:
    try:
        return pool.get_many(ids)
    except NotFoundError:
        if len(ids) <= 1:
            return []
    half = len(ids) // 2
    return [*_present(pool, ids[:half]), *_present(pool, ids[half:])]


def _not_empty(ids: Sequence[str]) -> list[str]:
    if not ids:
        raise EmptyKnowledgeBaseError(
            "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
        )
    return list(ids)
