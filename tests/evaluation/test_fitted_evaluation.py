"""Evaluations under a metric that is fitted to the labels of the knowledge base."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega._util.progress import Display
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods.method_actor import filled_knowledge
from bottega.evaluation.methods.retrieval import open_retrieval
from bottega.image import Image
from bottega.types import IMAGE_QUESTION, Example, Query


def example(kind: int, variant: int) -> Example:
    pixels = np.random.default_rng(10 * kind + variant).integers(0, 80, (32, 32, 3))
    pixels[8 * kind : 8 * kind + 8] += 120
    image = Image.from_pillow(Pillow.fromarray(pixels.astype(np.uint8)))
    return Example(Query(IMAGE_QUESTION, (image,), id=f"{kind}-{variant}"), f"kind {kind}")


KNOWLEDGE = tuple(example(kind, variant) for kind in range(3) for variant in range(6))
NEW = tuple(example(kind, 9) for kind in range(3))


def opened(items: tuple[Example, ...]) -> tuple[str, list[str], int]:
    """Return the metric of the filled knowledge base, the notes, and the examples it was fitted
    to."""
    data = Benchmark("kinds", KNOWLEDGE, items, ("kind 0", "kind 1", "kind 2"))
    notes: list[str] = []
    retrieval = open_retrieval("image", "pixels")
    with filled_knowledge(data, retrieval, "fitted", Display(note=notes.append)) as knowledge:
        stored = knowledge.note("metric") or ""
        fitted = int(stored.rpartition('"examples":')[2].partition(",")[0])
        return knowledge.stats().metric, notes, fitted


@pytest.mark.parametrize(
    ("items", "metric", "fitted"),
    [
        (NEW, "fitted, shrinkage 0.7", 18),
        (KNOWLEDGE[::6], "fitted, shrinkage 0.7", 15),
        (KNOWLEDGE, "cosine", 0),
    ],
    ids=["new", "a part", "all"],
)
def test_the_metric_is_fitted_without_the_evaluated_images(
    items: tuple[Example, ...], metric: str, fitted: int
) -> None:
    found, notes, count = opened(items)
    assert (found, count) == (metric, fitted)
    assert any("metric cosine" in note for note in notes) == (metric == "cosine")
