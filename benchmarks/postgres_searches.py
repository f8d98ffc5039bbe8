"""Searches of benchmarks/postgres.py: time, recall, filters, deleted rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.postgres_rows import (
    Databases,
    GivenVectors,
    K,
    alternating,
    fill,
    nearest_rows,
    query_vectors,
    recall,
    show,
    stored_vectors,
)
from benchmarks.stores import WIDTH, Ratio
from bottega import KnowledgeBase
from bottega.knowledge import Eq
from bottega.protocols import Vectors

NAME = "bottega_benchmark_search"
REMAINDER = 3  # row numbers with this remainder match a filter
# The expression must equal that of the knowledge base's index: otherwise the index is not used.
STORED, QUERY = (f"l2_normalize({one})::halfvec({WIDTH})" for one in ("vector", "$1::vector"))
DISTANCE = f"{STORED} <=> {QUERY}"
BARE = f"SELECT key, {DISTANCE} AS distance FROM kb_vectors_1 ORDER BY {DISTANCE} LIMIT {K}"
BARE_EXAMPLES = f"SELECT * FROM ({BARE}) AS found JOIN kb_examples USING (key) ORDER BY distance"


def measure_searches(databases: Databases, rows: int, count: int) -> Iterator[Ratio]:
    vectors = stored_vectors(rows, WIDTH)
    queries = query_vectors(2 * count, WIDTH)
    url = databases.create(NAME)
    with (
        KnowledgeBase.open(url, GivenVectors(vectors)) as kb,
        databases.connection(url) as connection,
    ):
        filled, built = fill(kb, rows, queries[0])
        print(f"{rows} x {WIDTH}: stored in {filled:.0f} s, index built in {built:.0f} s")
        yield from times(databases, kb, connection, queries, count)
        yield from recalls(kb, vectors, queries[:count])
        yield from deleted(kb, url, queries[:50])
    databases.drop(NAME)


def times(
    databases: Databases, kb: KnowledgeBase, connection: Any, queries: Vectors, count: int
) -> Iterator[Ratio]:
    def search(number: int) -> object:
        return kb.nearest(queries[number][None], K)

    def bare(statement: str) -> Callable[[int], object]:
        prepared = databases.run(connection.prepare(statement))
        return lambda number: databases.run(prepared.fetch(queries[number]))

    for number in range(count, count + 20):  # warm
        search(number)
        bare(BARE)(number)
    first, found = alternating([search, bare(BARE_EXAMPLES)], count)
    show("first search for a query", first)
    show("bare pgvector with the examples", found)
    ours, theirs = alternating([search, bare(BARE)], count)
    show("search", ours)
    show("bare pgvector", theirs)
    yield Ratio("search p50 / bare pgvector, ids and distances", ours.p50 / theirs.p50, 1.3)
    yield Ratio("search p90 / bare pgvector", ours.p90 / theirs.p90, None)
    yield Ratio("first search p50 / bare pgvector with examples", first.p50 / found.p50, None)


def recalls(kb: KnowledgeBase, vectors: Vectors, queries: Vectors) -> Iterator[Ratio]:
    found = recall(kb, nearest_rows(vectors, queries), queries)
    yield Ratio("recall@10 of the index", found, 0.95, at_least=True)
    for one_in, bar in ((20, None), (200, 0.99)):
        chosen = np.flatnonzero(np.arange(len(vectors)) % one_in == REMAINDER)
        truth = chosen[nearest_rows(vectors[chosen], queries)]
        where = Eq(f"tags.in{one_in}", str(REMAINDER))
        found = recall(kb, truth, queries, where=where)
        yield Ratio(f"recall@10 with a filter 1/{one_in}", found, bar, at_least=True)

        def filtered(number: int, where: Eq = where) -> object:
            return kb.nearest(queries[number][None], K, where=where)

        show(f"search with a filter 1/{one_in}", alternating([filtered], min(100, len(queries)))[0])


def deleted(kb: KnowledgeBase, url: str, queries: Vectors) -> Iterator[Ratio]:
    """Delete the nearest rows through a second handle, and count those still found."""
    again = 0
    with KnowledgeBase.open(url, GivenVectors(np.zeros_like(queries))) as other:
        for query in queries:
            gone = [str(hit.example.id) for hit in kb.nearest(query[None], K)[0]]
            other.delete(gone)
            later = kb.nearest(query[None], K)[0]
            again += len({hit.example.id for hit in later} & set(gone)) + K - len(later)
    yield Ratio("deleted rows found, or neighbours missing after it", again, 0)
