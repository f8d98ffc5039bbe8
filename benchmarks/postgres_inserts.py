"""Durable inserts of benchmarks/postgres.py, with and without an HNSW index."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.postgres_rows import (
    Databases,
    GivenVectors,
    alternating,
    fill,
    show,
    stored_vectors,
)
from benchmarks.stores import WIDTH, Ratio, clustered, noise
from bottega import Example, Image, KnowledgeBase, Query
from bottega.protocols import Vectors

NAME = "bottega_benchmark_insert"
# One table with all fields of an example; its unique id rejects duplicates.
BARE_TABLE = f"""
CREATE TABLE bare (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text UNIQUE, question text, answer text, image bytea, vector vector({WIDTH})
);
ALTER TABLE bare ALTER COLUMN image SET STORAGE EXTERNAL;
ALTER TABLE bare ALTER COLUMN vector SET STORAGE PLAIN;
INSERT INTO bare (id, question, answer, vector)
    SELECT id, question, answer, vector FROM kb_vectors_1 JOIN kb_examples USING (key);
"""
BARE_INDEX = f"CREATE INDEX ON bare USING hnsw ((vector::halfvec({WIDTH})) halfvec_cosine_ops)"
BARE_INSERT = "INSERT INTO bare (id, question, answer, image, vector) VALUES ($1, $2, $3, $4, $5)"


def measure_inserts(databases: Databases, rows: int, count: int) -> Iterator[Ratio]:
    for stored, index in ((rows, "with an HNSW index"), (1000, "without an index")):
        vectors = np.concatenate([stored_vectors(stored, WIDTH), clustered(count, 77, WIDTH)])
        url = databases.create(NAME)
        with (
            KnowledgeBase.open(url, GivenVectors(vectors)) as kb,
            databases.connection(url) as connection,
        ):
            fill(kb, stored, vectors[0])
            databases.run(connection.execute(BARE_TABLE))
            if stored == rows:
                databases.run(connection.execute(BARE_INDEX))
            databases.run(connection.execute("CHECKPOINT"))
            ours, bare = timed(databases, kb, connection, vectors, count)
            show(f"durable insert {index}", ours)
            show(f"bare INSERT {index}", bare)
            bar = 1.5 if stored == rows else None
            yield Ratio(f"durable insert p50 / bare INSERT, {index}", ours.p50 / bare.p50, bar)
        databases.drop(NAME)


def timed(
    databases: Databases, kb: KnowledgeBase, connection: Any, vectors: Vectors, count: int
) -> Any:
    images = [noise(number) for number in range(count)]
    for image in images:
        image.decode()  # an embedder has read it
    first = len(vectors) - count
    prepared = databases.run(connection.prepare(BARE_INSERT))

    def insert(number: int) -> None:
        image: Image = images[number]
        added = kb.add([Example(Query(str(first + number), (image,)), "new")])
        assert added.new == 1

    def bare(number: int) -> None:
        values = (uuid.uuid4().hex[:16], str(first + number), "new", images[number].data)
        databases.run(prepared.fetch(*values, vectors[first + number]))

    return alternating([insert, bare], count)
