"""The int8 copy of a token array and its products with a query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.late.maxsim import Positions, Rows, scores
from bottega.protocols import Vectors

Bytes = NDArray[np.uint8]
# Documents use 7 bits around 64. A pair of 8-bit products would overflow the 16-bit sums of AVX2.
ZERO, STEPS = 64, 63
# Kernels are laid out for multiples of eight columns.
MULTIPLE = 8
# Products are kept in 8 bits as well, from -0.33 to 1: no maximum that matters is further below 0.
PRODUCT_ZERO, PRODUCT_SCALE = 64, 1 / (255 - 64)
# What lies beyond is cut off, so that one odd number does not cost all others their precision.
KEPT = 0.9999


def fitting_scale(tokens: Vectors) -> float:
    """The step of one scale for all numbers."""
    largest = float(np.quantile(np.abs(tokens[:4096]), KEPT)) if tokens.size else 0.0
    return max(largest, 1e-3) / STEPS


def quantized(tokens: Vectors, scale: float) -> Bytes:
    steps = np.rint(tokens / scale) + ZERO
    held: Bytes = np.clip(steps, 0, ZERO + STEPS).astype(np.uint8)
    return held


def product_bytes(products: Vectors) -> Bytes:
    steps = np.rint(products / np.float32(PRODUCT_SCALE)) + PRODUCT_ZERO
    held: Bytes = np.clip(steps, 0, 255).astype(np.uint8)
    return held


def products_of(sums: Vectors, columns: int) -> Vectors:
    """The sums of products behind sums of `columns` bytes."""
    return (sums - PRODUCT_ZERO * columns) * np.float32(PRODUCT_SCALE)


def int8_scores(
    query: Vectors, tokens: Bytes, scale: float, offsets: Positions, documents: Positions
) -> Vectors:
    """As `exact_scores`, to about 1 %: good enough to say which documents are worth scoring."""
    padding = -len(query) % MULTIPLE
    padded = np.pad(query.astype(np.float32), ((0, padding), (0, 0)))
    found = scores(
        tokens,
        offsets,
        documents,
        _multiplier(padded, scale),
        query_tokens=len(padded),
        itemsize=1,
    )
    return products_of(found, len(padded))


def _multiplier(query: Vectors, scale: float) -> Callable[[Rows], Rows]:
    try:
        import torch

        operation: Any = torch.ops.onednn.qlinear_pointwise
        packing: Any = torch.ops.onednn.qlinear_prepack
    except (ImportError, AttributeError):
        return _in_float32(query, scale)
    step = max(float(np.abs(query).max()), 1e-6) / 127
    weights = torch.from_numpy(np.rint(query / step).astype(np.int8))
    packed = packing(weights, None)
    steps = torch.full((len(query),), step)
    zeros = torch.zeros(len(query), dtype=torch.int32)

    def multiply(rows: Rows) -> Rows:
        # torch._int_mm has a fast kernel only where the CPU has VNNI; this one also for AVX2, and
        # it writes a quarter of the bytes.
        products: Rows = operation(
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


def _in_float32(query: Vectors, scale: float) -> Callable[[Rows], Rows]:
    columns = np.ascontiguousarray(query.T) * np.float32(scale)
    return lambda rows: product_bytes((rows.astype(np.float32) - ZERO) @ columns)
