"""Script that wrote the files of this folder with commit fd291dc; see README.md."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from bottega.image import Image
from bottega.knowledge import KnowledgeBase, View
from bottega.types import Example, Query

Vectors = NDArray[np.float32]
DIMENSION = 8


def random_rows(seed: str, count: int) -> Vectors:
    rows = np.random.default_rng(list(seed.encode())).standard_normal((count, DIMENSION))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


class SeededEmbedder:
    """Embedder that derives a random unit vector from text and image hashes."""

    dimension = DIMENSION

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def embed(self, queries: Sequence[Query]) -> Vectors:
        seeds = ["".join([q.text, *(image.sha256 for image in q.images)]) for q in queries]
        return np.concatenate([random_rows(seed, 1) for seed in seeds])


class WordEmbedder:
    """Multi-vector embedder with one token per word; equal words have equal tokens."""

    fingerprint = "words"
    dimension = DIMENSION

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return [np.concatenate([random_rows(w, 1) for w in q.text.split()]) for q in queries]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self.embed_queries(queries)


def views() -> dict[str, View]:
    return {
        "default": View(SeededEmbedder("seeded")),
        "answer": View(SeededEmbedder("seeded-answer"), lambda example: Query(example.answer)),
    }


def image(shade: int) -> Image:
    return Image.from_pillow(Pillow.new("RGB", (8, 8), (shade, 0, 90)), source=f"{shade}.png")


def examples() -> list[Example]:
    return [
        Example(Query("which animal is this", (image(1),)), "cat", source="pets/1.png"),
        Example(
            Query("which animal is this", (image(2),), ("cat", "dog")),
            "dog",
            rationale="It has floppy ears.",
            tags={"split": "train", "context": "earlier turns"},
        ),
        Example(
            Query("which colours are shown", (image(3), image(4))),
            "red, blue",
            labels=("red", "blue"),
        ),
        Example(Query("what is two plus two"), "four", tags={"split": "test"}),
    ]


def main(folder: Path) -> None:
    late_index = import_module("bottega").LateIndex  # its name in that commit
    path = folder / "kb.db"
    with KnowledgeBase.open(path, views(), hnsw_above=2) as kb:
        kb.add([*examples(), Example(Query("a deleted question"), "none")])
        first, _, _, last, deleted = kb.ids()
        kb.delete([deleted])
        kb.pin([first])
        kb.used([first, last], saved_usd=0.5)
        kb.annotate(last, rationale="Count on your fingers.", tags={"checked": "yes"})
        kb.set_note("embedder", "seeded")
        kb.search(Query("what is two plus two"), 1)
        kb.search(Query("cat"), 1, by="answer")
        with late_index(kb, WordEmbedder(), folder / "late") as index:
            index.search(Query("which animal"), 1)
        kb.export_to(folder / "export")
    with KnowledgeBase.open(path, views(), namespace="ward", hnsw_above=2) as kb:
        kb.add(examples()[:1])
    path.with_name("kb.db.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
