"""The random baselines: uniform, and every label as often as the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import chain

from bottega._util.rng import query_rng
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError
from bottega.exclusion import is_excluded
from bottega.retrieval.ports import LabelledPool
from bottega.types import Candidate, Example, Query


class UniformSampler:
    """k examples drawn uniformly without replacement (many-shot ICL). Score 0 for all.

    The draw depends on `seed` and the query alone, so neither concurrency nor the order of the
    queries changes it. The pool's ids are read once, at construction; what is deleted later is left
    out.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._ids = _not_empty(pool.ids())
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = query_rng(query, self._seed)
        order = rng.sample(self._ids, len(self._ids))
        return await asyncio.to_thread(_take, self._pool, order, query, k)


class BalancedSampler:
    """k examples with every label as often as the others, give or take one; order shuffled.

    With k below the number of labels, k different labels are drawn. Seeded like `UniformSampler`.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._by_label = {label: list(ids) for label, ids in pool.ids_by_label().items()}
        _not_empty(list(self._by_label))
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = query_rng(query, self._seed)
        found = await asyncio.to_thread(_take, self._pool, self._rounds(rng), query, k)
        rng.shuffle(found)
        return found

    def _rounds(self, rng: random.Random) -> list[str]:
        """One id of every label, then a second of every label, and so on; each id once."""
        labels = rng.sample(list(self._by_label), len(self._by_label))
        columns = [
            rng.sample(self._by_label[label], len(self._by_label[label])) for label in labels
        ]
        depth = max(map(len, columns))
        rounds = ([column[i] for column in columns if i < len(column)] for i in range(depth))
        return list(dict.fromkeys(chain.from_iterable(rounds)))


def _take(pool: LabelledPool, order: Sequence[str], query: Query, k: int) -> list[Candidate]:
    """The first k of `order` that are not the query itself nor gone, fetched k at a time."""
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
