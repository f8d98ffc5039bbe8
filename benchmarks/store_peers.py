"""Other stores with the same rows: row i has the tags i % 20 and i % 200."""

from __future__ import annotations

import importlib.util
import itertools
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from bottega.protocols import Vectors

WANTED = 3  # the remainder that a filter asks for


@dataclass(frozen=True)
class Store:
    """Store under test. `search(vector, k, one_in)` returns row numbers; without durable rows there
    is no `insert`.
    """

    search: Callable[[Vectors, int, int | None], Sequence[int]]
    close: Callable[[], None]
    insert: Callable[[Vectors], object] | None = None


@dataclass(frozen=True)
class Peer:
    name: str
    build: Callable[[Path, Vectors], Store]
    needs: str = ""

    @property
    def missing(self) -> str:
        found = not self.needs or importlib.util.find_spec(self.needs)
        return "" if found else f"{self.needs} is not installed"


def peers() -> list[Peer]:
    return [
        Peer("bottega", bottega_store),
        Peer("faiss flat (memory only)", faiss_flat),
        Peer("faiss HNSW (memory only)", faiss_hnsw),
        Peer("SQLite and numpy", sqlite_only),
        Peer("hnswlib (memory only)", hnswlib_store, "hnswlib"),
        Peer("LanceDB HNSW_SQ", lancedb_store, "lancedb"),
    ]


def bottega_store(folder: Path, vectors: Vectors) -> Store:
    from benchmarks.stores import PrecomputedEmbedder, examples
    from bottega import Example, KnowledgeBase, Query
    from bottega.knowledge import Eq

    given = PrecomputedEmbedder(
        np.concatenate([vectors, np.zeros((100, vectors.shape[1]), np.float32)])
    )
    kb = KnowledgeBase.open(folder / "peer.db", given, hnsw_above=len(vectors) // 2)
    kb.add(examples(len(vectors)), batch_size=1000)
    kb.nearest(vectors[:1], 1)
    kb.wait_for_indexes()
    number = itertools.count(len(vectors))

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        where = None if one_in is None else Eq(f"tags.in{one_in}", str(WANTED))
        found = kb.nearest(vector[None], k, where=where)[0]
        return [int(candidate.example.query.text) for candidate in found]

    def insert(vector: Vectors) -> None:
        row = next(number)
        given.vectors[row] = vector
        kb.add([Example(Query(str(row)), "new")])

    return Store(search, kb.close, insert)


def selector(rows: int, one_in: int) -> faiss.IDSelectorBitmap:
    bits = np.packbits(np.arange(rows) % one_in == WANTED, bitorder="little")
    return faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]


def faiss_flat(folder: Path, vectors: Vectors) -> Store:
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        chosen = None if one_in is None else selector(len(vectors), one_in)
        options = faiss.SearchParameters(sel=chosen)  # type: ignore[call-arg]
        found: list[int] = index.search(vector[None], k, params=options)[1][0].tolist()
        return found

    return Store(search, lambda: None)


def faiss_hnsw(folder: Path, vectors: Vectors) -> Store:
    index = faiss.IndexHNSWFlat(vectors.shape[1], 16, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    index.add(vectors)

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        chosen = None if one_in is None else selector(len(vectors), one_in)
        options = faiss.SearchParametersHNSW(sel=chosen, efSearch=128)  # type: ignore[attr-defined]
        found: list[int] = index.search(vector[None], k, params=options)[1][0].tolist()
        return found

    return Store(search, lambda: None)


def sqlite_only(folder: Path, vectors: Vectors) -> Store:
    """Return a store that reads and compares all rows of SQLite for each search."""
    connection = sqlite3.connect(folder / "sqlite-only.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, vector BLOB)")
    connection.execute("BEGIN")
    rows = ((i, vector.tobytes()) for i, vector in enumerate(vectors))
    connection.executemany("INSERT INTO rows VALUES (?, ?)", rows)
    connection.execute("COMMIT")

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        where = "true" if one_in is None else f"id % {one_in} = {WANTED}"
        found = connection.execute(f"SELECT id, vector FROM rows WHERE {where}").fetchall()
        table = np.frombuffer(b"".join(blob for _, blob in found), np.float32)
        scores = table.reshape(len(found), -1) @ vector
        return [found[i][0] for i in np.argsort(-scores)[:k]]

    def insert(vector: Vectors) -> None:
        connection.execute("INSERT INTO rows (vector) VALUES (?)", [vector.tobytes()])

    return Store(search, connection.close, insert)


def hnswlib_store(folder: Path, vectors: Vectors) -> Store:
    import hnswlib

    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(len(vectors), M=16, ef_construction=100)
    index.set_num_threads(1)
    index.add_items(vectors)
    index.set_ef(128)

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        keep = None if one_in is None else (lambda row: row % one_in == WANTED)
        found: list[int] = index.knn_query(vector[None], k, filter=keep)[0][0].tolist()
        return found

    return Store(search, lambda: None)


def lancedb_store(folder: Path, vectors: Vectors) -> Store:
    import lancedb
    import pyarrow

    def table_of(chosen: Vectors, first: int) -> pyarrow.Table:
        flat = pyarrow.array(chosen.ravel())
        column = pyarrow.FixedSizeListArray.from_arrays(flat, chosen.shape[1])
        ids = np.arange(first, first + len(chosen))
        return pyarrow.table({"id": ids, "vector": column, "in20": ids % 20, "in200": ids % 200})

    table = lancedb.connect(folder / "lance").create_table("rows", table_of(vectors, 0))
    table.create_index(
        metric="cosine", index_type="IVF_HNSW_SQ", num_partitions=1, m=16, ef_construction=100
    )
    for name in ("in20", "in200"):
        table.create_scalar_index(name)
    number = itertools.count(len(vectors))

    def search(vector: Vectors, k: int, one_in: int | None) -> list[int]:
        request = table.search(vector).metric("cosine").ef(128).refine_factor(2).limit(k)
        if one_in is not None:
            request = request.where(f"in{one_in} = {WANTED}", prefilter=True)
        return [int(row["id"]) for row in request.select(["id", "_distance"]).to_list()]

    return Store(search, lambda: None, lambda v: table.add(table_of(v[None], next(number))))
