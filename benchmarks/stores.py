"""Compare knowledge bases with faiss and with writes to the disk.

python benchmarks/stores.py [--quick] [--json FILE] [--parts exact graph inserting crashing peers]

Times are medians of calls that alternate between the store and what it is compared with, in one
run on one machine, because ratios depend less on other load. --quick takes fewer rows for the graph
and fewer rounds, and ends within five minutes. The same rows and queries are then measured in other
stores; those that are not installed are skipped. Exits with 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import faiss
import numpy as np
from PIL import Image as Pillow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.processes import clocks, since
from benchmarks.store_peers import Peer, peers
from bottega import Example, Image, KnowledgeBase, Query
from bottega.knowledge import Eq
from bottega.knowledge.index.hnsw import EF_SEARCH
from bottega.knowledge.records import unit
from bottega.knowledge.sqlite.search import FileSearch
from bottega.protocols import Vectors
from tests.knowledge.test_crashes import crash

WIDTH, K, QUERIES = 512, 10, 200
NEVER = 10**9


@dataclass(frozen=True)
class Size:
    """Rows of the exact index and of the graph, and rounds of the crash test."""

    flat: int
    graph: int
    inserts: int
    crashes: int


QUICK = Size(flat=100_000, graph=20_000, inserts=100, crashes=5)
FULL = Size(flat=100_000, graph=100_000, inserts=300, crashes=200)


@dataclass(frozen=True)
class Ratio:
    name: str
    value: float
    bar: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return bool(self.value >= self.bar if self.at_least else self.value <= self.bar)

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        bar = "" if self.bar is None else f"{sign} {self.bar:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.name:62} {self.value:8.3f}  {bar:8} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows for the graph, fewer rounds: 5 minutes"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file (default: none)")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[*PARTS, PEERS],
        choices=[*PARTS, PEERS],
        help=f"parts to run; {PEERS} measures other stores (default: all)",
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    faiss.omp_set_num_threads(1)
    ratios: list[Ratio] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, part in PARTS.items():
            for ratio in part(Path(folder), size) if name in arguments.parts else ():
                print(ratio, flush=True)
                ratios.append(ratio)
        compared = list(side_by_side(Path(folder), size)) if PEERS in arguments.parts else []
    if arguments.json:
        document = {
            "size": asdict(size),
            "cores": os.cpu_count(),
            "ratios": [asdict(ratio) | {"met": ratio.met} for ratio in ratios],
            "peers": compared,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(1 if any(ratio.met is False for ratio in ratios) else 0)


class PrecomputedEmbedder:
    """Embedder that returns precomputed vectors: only the store is measured."""

    fingerprint, dimension = "given-512", WIDTH

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return self.vectors[[int(query.text) % len(self.vectors) for query in queries]]


def clustered(rows: int, seed: int = 0, width: int = WIDTH) -> Vectors:
    """Return unit vectors around as many centres as a large data set has classes."""
    centres = np.random.default_rng(9).standard_normal((1000, width))
    rng = np.random.default_rng(seed)
    found = centres[rng.integers(1000, size=rows)] + 0.7 * rng.standard_normal((rows, width))
    return unit(found.astype(np.float32))


def examples(rows: int) -> Iterator[Example]:
    """Yield examples without images, so both sides handle the same bytes."""
    for i in range(rows):
        yield Example(Query(str(i)), "yes", tags={"in20": str(i % 20), "in200": str(i % 200)})


@contextmanager
def filled(path: Path, vectors: Vectors, hnsw_above: int) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(path, PrecomputedEmbedder(vectors), hnsw_above=hnsw_above) as kb:
        kb.add(examples(len(vectors)), batch_size=1000)
        kb.nearest(vectors[:1], 1)
        kb.wait_for_indexes()
        yield kb


Search = Callable[[Vectors], object]


def medians(searches: Sequence[Search], queries: Vectors, warm: bool = True) -> list[float]:
    """Return the median seconds of each function, called alternately with the same query. The first
    call warms the processor's cache for the second, so the order alternates, too.
    """
    for query in queries if warm else []:
        for search in searches:
            search(query[None])
    times: list[list[float]] = [[] for _ in searches]
    both = list(zip(times, searches, strict=True))
    for number, query in enumerate(queries):
        for taken, search in both if number % 2 else reversed(both):
            taken.append(timed(lambda search=search, query=query: search(query[None])))  # type: ignore[misc]
    return [float(np.median(taken)) for taken in times]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def exact(folder: Path, size: Size) -> Iterator[Ratio]:
    vectors, queries = clustered(size.flat), clustered(QUERIES, seed=1)
    flat = faiss.IndexFlatIP(WIDTH)
    flat.add(vectors)
    with filled(folder / "flat.db", vectors, NEVER) as kb:
        ours, bare = medians(
            [lambda q: kb.nearest(q, K), lambda q: flat.search(q, K)], queries[:60]
        )
        yield Ratio("exact search / faiss flat", ours / bare, 1.2)
        rare = Eq("tags.in200", "3")
        first = timed(lambda: kb.nearest(queries[:1], K, where=rare))
        options = bitmap(np.arange(size.flat) % 200 == 3)
        ours, bare = medians(
            [
                lambda q: kb.nearest(q, K, where=rare),
                lambda q: flat.search(q, K, params=options),
            ],
            queries,
        )
        yield Ratio("filter 1/200 / faiss bitmap", ours / bare, 1.5)
        yield Ratio("first use of that filter, ms", first * 1000, None)


def bitmap(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> faiss.SearchParameters:
    bits = np.packbits(chosen, bitorder="little")
    return faiss.SearchParameters(sel=faiss.IDSelectorBitmap(bits))  # type: ignore[call-arg, arg-type]


def graph(folder: Path, size: Size) -> Iterator[Ratio]:
    vectors, queries = clustered(size.graph), clustered(QUERIES, seed=1)
    path = folder / "graph.db"
    with filled(path, vectors, size.graph // 2) as kb:
        file = f"{path}.default.index"
        bare_graph = faiss.read_index(file)
        options = faiss.SearchParametersHNSW(efSearch=EF_SEARCH)  # type: ignore[attr-defined]
        both = both_of(kb, bare_graph, options)
        cold, bare = medians(both, queries, warm=False)
        yield Ratio("HNSW / faiss HNSW, every example read from the file", cold / bare, None)
        before, bare = medians(both, queries)
        yield Ratio("HNSW / faiss HNSW", before / bare, 1.5)
        present = np.ones(size.graph, bool)
        yield Ratio("HNSW recall", recall(kb, vectors, queries, present), 0.95, at_least=True)
        for one_in in (20, 200):
            chosen = np.arange(size.graph) % one_in == 3
            where = Eq(f"tags.in{one_in}", "3")
            value = recall(kb, vectors, queries, chosen, where=where)
            yield Ratio(f"filtered recall 1/{one_in}", value, 0.99, at_least=True)
        ids = np.array(kb.ids())
        present[::10] = False
        kb.delete(ids[~present].tolist())
        value = recall(kb, vectors, queries, present)
        yield Ratio("recall after deleting 10 %", value, 0.99, at_least=True)
        after, bare_after = medians(both, queries)
        yield Ratio("search after deleting 10 % / before", after * bare / bare_after / before, 1.3)
        more = present & (np.arange(size.graph) % 10 < 3)
        kb.delete(ids[more].tolist())
        yield stall(kb, queries)
    opened = []
    for _ in range(5):
        opened.append(reopening(path, vectors, queries, size.graph // 2))
    loaded = [timed(lambda: faiss.read_index(file)) for _ in range(5)]
    # Fixed costs dominate with fewer rows.
    required = 2.5 if size.graph >= FULL.graph else None
    yield Ratio("reopening / faiss loading", float(np.median(opened) / np.median(loaded)), required)
    with KnowledgeBase.open(path, PrecomputedEmbedder(vectors), hnsw_above=size.graph // 2) as kb:
        before, bare = medians(both_of(kb, bare_graph, options), queries)
        for i in range(300):
            kb.add([Example(Query(str(size.graph + i)), "new")])
        after, bare_after = medians(both_of(kb, bare_graph, options), queries)
        yield Ratio("search after 300 inserts / before", after * bare / bare_after / before, 1.3)


def both_of(kb: KnowledgeBase, bare: faiss.Index, options: faiss.SearchParameters) -> list[Search]:
    return [lambda q: kb.nearest(q, K), lambda q: bare.search(q, K, params=options)]


def reopening(path: Path, vectors: Vectors, queries: Vectors, hnsw_above: int) -> float:
    start = time.perf_counter()
    kb = KnowledgeBase.open(path, PrecomputedEmbedder(vectors), hnsw_above=hnsw_above)
    kb.nearest(queries[:1], K)
    seconds = time.perf_counter() - start
    kb.close()
    return seconds


def recall(
    kb: KnowledgeBase,
    vectors: Vectors,
    queries: Vectors,
    chosen: np.ndarray[tuple[int], np.dtype[np.bool_]],
    where: Eq | None = None,
) -> float:
    """Return the share of the true ten nearest rows, among the selected ones, that was found."""
    rows = np.flatnonzero(chosen)
    nearest = np.argpartition(-(queries @ vectors[rows].T), K, axis=1)[:, :K]
    found = kb.nearest(queries, K, where=where)
    return float(
        np.mean(
            [
                len({str(row) for row in rows[best]} & {c.example.query.text for c in hits}) / K
                for best, hits in zip(nearest, found, strict=True)
            ]
        )
    )


def stall(kb: KnowledgeBase, queries: Vectors) -> Ratio:
    """Search while the graph is rebuilt: a blocked search would take as long as the rebuild."""
    start, longest, i = time.perf_counter(), 0.0, 0
    kb.nearest(queries[:1], K)
    while building(kb):
        longest = max(longest, timed(lambda: kb.nearest(queries[i % QUERIES][None], K)))  # noqa: B023
        i += 1
    whole = time.perf_counter() - start
    return Ratio("longest search while rebuilding / rebuilding", longest / whole, 0.1)


def building(kb: KnowledgeBase) -> bool:
    search = kb._searcher
    assert isinstance(search, FileSearch)
    return any(follower.is_building for follower in search._followers.values())


def inserting(folder: Path, size: Size) -> Iterator[Ratio]:
    vectors = clustered(2000)
    path = folder / "insert.db"
    images = [noise(i) for i in range(size.inserts)]
    with (
        KnowledgeBase.open(path, PrecomputedEmbedder(vectors)) as kb,
        (folder / "raw").open("wb", buffering=0) as raw,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_reader", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).resolve().parent.parent,
        ) as reader,
    ):
        kb.add([Example(Query("1999"), "first")])
        kb.nearest(vectors[:1], 1)
        bare = bare_sqlite(folder / "bare.db")
        seconds: dict[str, list[tuple[float, float]]] = {
            "add": [],
            "search": [],
            "there": [],
            "raw": [],
            "bare": [],
        }
        for i, image in enumerate(images):
            query = Query(str(i), (image,))
            start = clocks()
            kb.add([Example(query, "yes")])
            seconds["add"].append(since(start))
            found = kb.nearest(vectors[i][None], 1)[0][0].example
            seconds["search"].append(since(start))
            assert found.query.text == str(i)
            see_elsewhere(reader, i)
            seconds["there"].append(since(start))
            start = clocks()
            raw.write(image.data)
            os.fdatasync(raw.fileno())
            seconds["raw"].append(since(start))
            start = clocks()
            bare.execute("INSERT INTO images (data) VALUES (?)", [image.data])
            seconds["bare"].append(since(start))
        bare.close()
        assert reader.stdin is not None
        reader.stdin.close()
    with KnowledgeBase.open(":memory:", PrecomputedEmbedder(vectors)) as memory:
        fresh = [Example(Query(str(i), (image,)), "no") for i, image in enumerate(images)]
        work = float(np.median([timed(lambda e=e: memory.add([e])) for e in fresh]))  # type: ignore[misc]
    awake = {name: float(np.median(taken, axis=0)[1]) for name, taken in seconds.items()}
    add, search, there, disk, least = (
        float(np.median(taken, axis=0)[0]) for taken in seconds.values()
    )
    yield Ratio("durable insert + 50 KB / fdatasync", add / disk, 1.5)
    yield Ratio("the same until found by a search / fdatasync", search / disk, 1.5)
    yield Ratio("the same until found by another process / insert", there / add, 3)
    yield Ratio("one table of images in SQLite, same bytes / fdatasync", least / disk, None)
    yield Ratio("fdatasync of 50 KB, ms", disk * 1000, None)
    yield Ratio("insert / fdatasync, less waiting for a core", awake["add"] / awake["raw"], 1.5)
    yield Ratio("fdatasync of 50 KB, less waiting for a core, ms", awake["raw"] * 1000, None)
    yield Ratio("the insert's work without a disk, image check included, ms", work * 1000, None)


def bare_sqlite(path: Path) -> sqlite3.Connection:
    """Return the minimal cost of a store in SQLite."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE images (key INTEGER PRIMARY KEY, data BLOB NOT NULL)")
    return connection


def see_elsewhere(reader: subprocess.Popen[str], number: int) -> None:
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(f"{number}\n")
    assert reader.stdout.readline().strip() == str(number)


def noise(seed: int) -> Image:
    """Return about 50 KB of incompressible bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (129, 129, 3), np.uint8)
    return Image.from_pillow(Pillow.fromarray(pixels))


def crashing(folder: Path, size: Size) -> Iterator[Ratio]:
    kept = crash(folder / "crash.db", size.crashes, seed=2)  # raises if one is missing
    print(f"{kept} rows were acknowledged before {size.crashes} kills")
    yield Ratio("acknowledged rows missing", 0.0, 0.0)


def side_by_side(folder: Path, size: Size) -> Iterator[dict[str, object]]:
    vectors, queries = clustered(size.graph), clustered(50, seed=1)
    print(f"\n{size.graph} rows, medians in ms: search, 1/20, 1/200, durable insert of one row")
    for peer in peers():
        measured = measure(peer, folder, vectors, queries)
        shown = "  ".join(f"{name} {value}" for name, value in measured.items())
        print(shown, flush=True)
        yield measured


def measure(peer: Peer, folder: Path, vectors: Vectors, queries: Vectors) -> dict[str, object]:
    if peer.missing:
        return {"name": peer.name, "skipped": peer.missing}
    start = time.perf_counter()
    store = peer.build(folder, vectors)
    built = time.perf_counter() - start
    truth = np.argpartition(-(queries @ vectors.T), K, axis=1)[:, :K]
    found = [store.search(query, K, None) for query in queries]
    same = [len(set(best) & set(hits)) / K for best, hits in zip(truth, found, strict=True)]
    row: dict[str, object] = {"name": peer.name, "build_s": round(built, 1)}
    row["recall"] = round(float(np.mean(same)), 3)
    for one_in in (None, 20, 200):
        (taken,) = medians([lambda q, n=one_in: store.search(q[0], K, n)], queries)  # type: ignore[misc]
        row["search_ms" if one_in is None else f"filter_{one_in}_ms"] = round(taken * 1000, 3)
    if store.insert is not None:
        taken_all = [timed(lambda v=v: store.insert(v)) for v in clustered(20, seed=3)]  # type: ignore[misc]
        row["insert_ms"] = round(float(np.median(taken_all)) * 1000, 3)
    store.close()
    return row


PARTS = {"exact": exact, "graph": graph, "inserting": inserting, "crashing": crashing}
PEERS = "peers"

if __name__ == "__main__":
    main()
