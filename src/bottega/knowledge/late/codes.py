"""Each token's nearest centroid: what most documents are ruled out by, with no products at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.late.int8 import product_bytes, products_of
from bottega.knowledge.late.maxsim import Positions, Rows, sums_of_maxima, taken
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors

if TYPE_CHECKING:
    import faiss
else:
    from bottega.knowledge import lazy_faiss as faiss

Codes = NDArray[np.uint16]
TOKENS_A_CENTROID = 64
FEWEST, MOST = 64, 4096
ROUNDS = 5
SAMPLE_A_CENTROID = 40
AT_ONCE = 1 << 16
BLOCK_BYTES = 1 << 19
GROUP = 64


def trained_centroids(tokens: Rows, seed: int) -> Vectors:
    """(centroids, dimension) unit rows by spherical K-means on a sample."""
    count = 1 << (max(len(tokens) // TOKENS_A_CENTROID, 1)).bit_length() - 1
    count = min(max(count, FEWEST), MOST, len(tokens))
    wanted = min(len(tokens), count * SAMPLE_A_CENTROID)
    chosen = np.random.default_rng(seed).choice(len(tokens), wanted, replace=False)
    sample = np.ascontiguousarray(tokens[np.sort(chosen)], dtype=np.float32)
    kmeans = faiss.Kmeans(
        tokens.shape[1], count, niter=ROUNDS, seed=seed, spherical=True, min_points_per_centroid=1
    )
    kmeans.train(sample)
    return unit(np.asarray(kmeans.centroids, np.float32))


def nearest_centroids(tokens: Rows, centroids: Vectors) -> Codes:
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(centroids)
    found = np.empty(len(tokens), np.uint16)
    for start in range(0, len(tokens), AT_ONCE):
        rows = np.ascontiguousarray(tokens[start : start + AT_ONCE], dtype=np.float32)
        found[start : start + AT_ONCE] = index.search(rows, 1)[1][:, 0]
    return found


@dataclass(frozen=True)
class _Group:
    documents: Positions
    codes: NDArray[np.intp]  # (documents, longest)


class CodeScan:
    """MaxSim with every document token replaced by its centroid (PLAID, sec. 3.2: centroid
    interaction). A query costs one small product and a table look-up a token."""

    def __init__(self, centroids: Vectors, codes: Codes, offsets: Positions) -> None:
        self._centroids = centroids
        self._count = len(offsets) - 1
        self._groups = list(_grouped(codes, offsets))

    def scores(self, query: Vectors) -> Vectors:
        """(documents,) approximate, for ranking only."""
        table = product_bytes(self._centroids @ query.T)
        found = np.empty(self._count, np.float32)
        for group in self._groups:
            _fill(found, group, table)
        return products_of(found, len(query))


def _fill(found: Vectors, group: _Group, table: NDArray[np.uint8]) -> None:
    longest = group.codes.shape[1]
    size = max(1, BLOCK_BYTES // (longest * table.shape[1]))
    for start in range(0, len(group.documents), size):
        codes = group.codes[start : start + size]
        found[group.documents[start : start + size]] = sums_of_maxima(taken(table, codes))


def _grouped(codes: Codes, offsets: Positions) -> Iterator[_Group]:
    """Documents with like numbers of different codes; fewer are filled up with the last one, which
    changes no maximum."""
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    different = [np.unique(codes[start:stop]) for start, stop in bounds]
    order = np.argsort([len(held) for held in different], kind="stable")
    for start in range(0, len(order), GROUP):
        chosen = order[start : start + GROUP]
        longest = len(different[chosen[-1]])
        rows = [np.pad(different[i], (0, longest - len(different[i])), "edge") for i in chosen]
        yield _Group(chosen, np.stack(rows).astype(np.intp))


@dataclass(frozen=True)
class Coded:
    """Centroids, and the code of each of the first tokens of an array."""

    centroids: Vectors
    codes: Codes

    @classmethod
    def of(cls, tokens: Rows, seed: int) -> Coded:
        centroids = trained_centroids(tokens, seed)
        return cls(centroids, nearest_centroids(tokens, centroids))

    def extended(self, tokens: Rows) -> Coded:
        """With codes for the tokens that have none yet."""
        more = nearest_centroids(tokens[len(self.codes) :], self.centroids)
        return Coded(self.centroids, np.concatenate([self.codes, more]))

    def outgrown(self, tokens: int) -> bool:
        """Whether so many tokens deserve more centroids."""
        return len(self.centroids) < MOST and tokens >= 4 * TOKENS_A_CENTROID * len(self.centroids)

    def save(self, path: Path) -> None:
        draft = path.with_name(path.name + ".new")
        with draft.open("wb") as file:
            np.savez(file, centroids=self.centroids, codes=self.codes)
        draft.replace(path)

    @classmethod
    def load(cls, path: Path, dimension: int) -> Coded | None:
        """None if there is no such file or it is damaged: zip files carry checksums."""
        try:
            with np.load(path, allow_pickle=False) as held:
                found = cls(held["centroids"], held["codes"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        fits = found.centroids.shape[1:] == (dimension,) and found.codes.dtype == np.uint16
        return found if fits else None
