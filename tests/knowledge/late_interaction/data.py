"""Token matrices sampled around shared words, clustered like text and image tokens."""

from __future__ import annotations

import numpy as np

from bottega.knowledge.records import unit
from bottega.protocols import Vectors

DIMENSION = 32


def documents(
    count: int, *, seed: int, words: int = 40, noise: float = 0.4, longest: int = 20
) -> list[Vectors]:
    """Return matrices with 1 to `longest` unit rows."""
    rng = np.random.default_rng(seed)
    vocabulary = unit(rng.normal(size=(words, DIMENSION)).astype(np.float32))
    return [
        near(vocabulary[rng.integers(words, size=rng.integers(1, longest + 1))], rng, noise)
        for _ in range(count)
    ]


def near(rows: Vectors, rng: np.random.Generator, noise: float) -> Vectors:
    offsets = rng.normal(size=rows.shape).astype(np.float32)
    return unit(rows + np.float32(noise) * unit(offsets))


def names(count: int, start: int = 0) -> list[str]:
    return [f"d{number}" for number in range(start, start + count)]
