"""Centroid codes and int8 tokens: cheap scores that exclude most documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.late_interaction.maxsim import (
    Positions,
    TokenRows,
    float32_products,
    scores,
    sums_of_maxima,
    take_rows,
)
from bottega.knowledge.records import unit
from bottega.protocols import Vectors

Codes = NDArray[np.uint16]
TOKENS_PER_CENTROID = 64
MIN_CENTROIDS, MAX_CENTROIDS = 64, 4096
ITERATIONS = 5
SAMPLE_PER_CENTROID = 40
BATCH = 1 << 16
BLOCK_BYTES = 1 << 19
GROUP = 64
Bytes = NDArray[np.uint8]
# Documents use 7 bits around 64: pairs of 8-bit products would overflow AVX2's 16-bit sums.
ZERO, STEPS = 64, 63
# Kernels require multiples of eight columns.
MULTIPLE = 8
# Products use 8 bits too, from -0.33 to 1: relevant maxima are not lower.
PRODUCT_ZERO, PRODUCT_SCALE = 64, 1 / (255 - 64)
# Larger values are clipped, so one outlier does not reduce the precision of all others.
CLIP_QUANTILE = 0.9999


def train_centroids(tokens: TokenRows, seed: int) -> Vectors:
    """Return (centroids, dimension) unit rows by spherical K-means on a sample."""
    count = 1 << (max(len(tokens) // TOKENS_PER_CENTROID, 1)).bit_length() - 1
    count = min(max(count, MIN_CENTROIDS), MAX_CENTROIDS, len(tokens))
    wanted = min(len(tokens), count * SAMPLE_PER_CENTROID)
    chosen = np.random.default_rng(seed).choice(len(tokens), wanted, replace=False)
    sample = np.ascontiguousarray(tokens[np.sort(chosen)], dtype=np.float32)
    kmeans = faiss.Kmeans(
        tokens.shape[1],
        count,
        niter=ITERATIONS,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
    )
    kmeans.train(sample)
    return unit(np.asarray(kmeans.centroids, np.float32))


def nearest_centroids(tokens: TokenRows, centroids: Vectors) -> Codes:
    """Return (tokens,) the index of each token's nearest centroid."""
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(centroids)
    found = np.empty(len(tokens), np.uint16)
    for start in range(0, len(tokens), BATCH):
        rows = np.ascontiguousarray(tokens[start : start + BATCH], dtype=np.float32)
        found[start : start + BATCH] = index.search(rows, 1)[1][:, 0]
    return found


@dataclass(frozen=True)
class _Cluster:
    documents: Positions
    codes: NDArray[np.intp]  # (documents, longest)


class CodeScan:
    """MaxSim with every document token replaced by its centroid (PLAID, sec. 3.2: centroid
    interaction).

    A query costs one small product and one table look-up per token.
    """

    def __init__(self, centroids: Vectors, codes: Codes, offsets: Positions) -> None:
        self._centroids = centroids
        self._count = len(offsets) - 1
        self._groups = list(_grouped(codes, offsets))

    def scores(self, query: Vectors) -> Vectors:
        """Return (documents,) approximate scores, for ranking only."""
        table = quantize_products(float32_products(self._centroids, np.array(query.T, np.float32)))
        found = np.empty(self._count, np.float32)
        for group in self._groups:
            size = max(1, BLOCK_BYTES // (group.codes.shape[1] * table.shape[1]))
            for start in range(0, len(group.documents), size):
                chosen, codes = group.documents[start:][:size], group.codes[start:][:size]
                found[chosen] = sums_of_maxima(take_rows(table, codes))
        return dequantize_sums(found, len(query))


def _grouped(codes: Codes, offsets: Positions) -> Iterator[_Cluster]:
    """Yield documents with similar numbers of distinct codes; shorter ones repeat their last code,
    which changes no maximum."""
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    different = [np.unique(codes[start:stop]) for start, stop in bounds]
    order = np.argsort([len(distinct) for distinct in different], kind="stable")
    for start in range(0, len(order), GROUP):
        chosen = order[start : start + GROUP]
        longest = len(different[chosen[-1]])
        rows = [np.pad(different[i], (0, longest - len(different[i])), "edge") for i in chosen]
        yield _Cluster(chosen, np.stack(rows).astype(np.intp))


@dataclass(frozen=True)
class CentroidCodes:
    """Centroids, and the codes of the first tokens of an array."""

    centroids: Vectors
    codes: Codes

    @classmethod
    def of(cls, tokens: TokenRows, seed: int) -> CentroidCodes:
        centroids = train_centroids(tokens, seed)
        return cls(centroids, nearest_centroids(tokens, centroids))

    def extend(self, tokens: TokenRows) -> CentroidCodes:
        """Return codes with those of the tokens that have none yet."""
        more = nearest_centroids(tokens[len(self.codes) :], self.centroids)
        return CentroidCodes(self.centroids, np.concatenate([self.codes, more]))

    def is_outgrown(self, tokens: int) -> bool:
        """Return whether that many tokens need more centroids."""
        return len(self.centroids) < MAX_CENTROIDS and tokens >= 4 * TOKENS_PER_CENTROID * len(
            self.centroids
        )

    def save(self, path: Path) -> None:
        draft = path.with_name(path.name + ".new")
        with draft.open("wb") as file:
            np.savez(file, centroids=self.centroids, codes=self.codes)
        draft.replace(path)

    @classmethod
    def load(cls, path: Path, dimension: int) -> CentroidCodes | None:
        """Return the stored codes, or None if the file is missing or damaged (zip files have
        checksums)."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = cls(arrays["centroids"], arrays["codes"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        fits = found.centroids.shape[1:] == (dimension,) and found.codes.dtype == np.uint16
        return found if fits else None


def fitting_scale(tokens: Vectors) -> float:
    """Return the quantization step for these tokens."""
    largest = float(np.quantile(np.abs(tokens[:4096]), CLIP_QUANTILE)) if tokens.size else 0.0
    return max(largest, 1e-3) / STEPS


def quantize(tokens: Vectors, scale: float) -> Bytes:
    steps = np.rint(tokens / scale) + ZERO
    quantized: Bytes = np.clip(steps, 0, ZERO + STEPS).astype(np.uint8)
    return quantized


def quantize_products(products: Vectors) -> Bytes:
    steps = np.rint(products / np.float32(PRODUCT_SCALE)) + PRODUCT_ZERO
    quantized: Bytes = np.clip(steps, 0, 255).astype(np.uint8)
    return quantized


def dequantize_sums(sums: Vectors, columns: int) -> Vectors:
    """Return the sums of products for sums over `columns` bytes."""
    return (sums - PRODUCT_ZERO * columns) * np.float32(PRODUCT_SCALE)


def int8_scores(
    query: Vectors, tokens: Bytes, scale: float, offsets: Positions, documents: Positions
) -> Vectors:
    """Return scores within about 1 % of `exact_scores`, to select the documents to score
    exactly."""
    padding = -len(query) % MULTIPLE
    padded = np.pad(query.astype(np.float32), ((0, padding), (0, 0)))
    found = scores(
        tokens, offsets, documents, _multiplier(padded, scale), query_tokens=len(padded), itemsize=1
    )
    return dequantize_sums(found, len(padded))


def _multiplier(query: Vectors, scale: float) -> Callable[[TokenRows], TokenRows]:
    try:
        import torch

        operation: Any = torch.ops.onednn.qlinear_pointwise
        packing: Any = torch.ops.onednn.qlinear_prepack
    except (ImportError, AttributeError):
        columns = np.ascontiguousarray(query.T) * np.float32(scale)
        return lambda rows: quantize_products((rows.astype(np.float32) - ZERO) @ columns)
    step = max(float(np.abs(query).max()), 1e-6) / 127
    weights = torch.from_numpy(np.rint(query / step).astype(np.int8))
    packed = packing(weights, None)
    # Not torch's default dtype, which transformers changes while it loads another model.
    steps = torch.full((len(query),), step, dtype=torch.float32)
    zeros = torch.zeros(len(query), dtype=torch.int32)

    def multiply(rows: TokenRows) -> TokenRows:
        # torch._int_mm is fast only on CPUs with VNNI; this kernel is also fast on AVX2 and
        # writes a quarter of the bytes.
        products: TokenRows = operation(
            torch.from_numpy(rows),
            scale,
            ZERO,
            packed,
            steps,
            zeros,
            None,
            PRODUCT_SCALE,
            PRODUCT_ZERO,
            torch.uint8,
            "none",
            [],
            "",
        ).numpy()
        return products

    return multiply
