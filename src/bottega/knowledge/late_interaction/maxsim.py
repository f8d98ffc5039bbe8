"""MaxSim: the sum over the query's tokens of the largest dot product with a document's tokens.

Khattab and Zaharia, ColBERT, sec. 3.3; RCTS uses it over image and text tokens together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.protocols import Vectors

Positions = NDArray[np.int64]
# Token rows in any dtype.
TokenRows = NDArray[Any]
# The products of one block should fit the second-level cache.
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Block:
    """Documents with similar lengths. `rows` (documents, longest) are the token rows of each
    document; shorter ones repeat their last row, which changes no maximum."""

    documents: Positions
    rows: Positions


def blocks(
    offsets: Positions, documents: Positions, query_tokens: int, itemsize: int
) -> Iterator[Block]:
    """Yield blocks of documents, sorted by length, whose products fit the cache."""
    lengths = offsets[documents + 1] - offsets[documents]
    order = np.argsort(lengths, kind="stable")
    documents, lengths = documents[order], lengths[order]
    start = 0
    while start < len(documents):
        size = max(1, BLOCK_BYTES // int(lengths[start] * query_tokens * itemsize))
        chosen = documents[start : start + size]
        longest = np.arange(lengths[start : start + size].max())
        first, last = offsets[chosen], offsets[chosen + 1] - 1
        yield Block(chosen, np.minimum(first[:, None] + longest, last[:, None]))
        start += size


def scores(
    tokens: TokenRows,
    offsets: Positions,
    documents: Positions,
    multiply: Callable[[TokenRows], TokenRows],
    *,
    query_tokens: int,
    itemsize: int,
) -> Vectors:
    """Return (documents,) sums of maxima. `multiply` maps (rows, dimension) of `tokens` to products
    with the query, (rows, query_tokens), and defines the unit."""
    found = np.empty(len(offsets) - 1, np.float32)
    for block in blocks(offsets, documents, query_tokens, itemsize):
        products = multiply(take_rows(tokens, block.rows.reshape(-1)))
        found[block.documents] = sums_of_maxima(products.reshape(*block.rows.shape, -1))
    return found[documents]


def exact_scores(
    query: Vectors, tokens: TokenRows, offsets: Positions, documents: Positions | None = None
) -> Vectors:
    """Return (documents,) MaxSim scores in float32, the reference for approximations.

    `query` is (query_tokens, dimension). `tokens` is the flat (tokens, dimension) array of all
    documents; document i has the rows offsets[i]:offsets[i + 1].
    """
    chosen = np.arange(len(offsets) - 1) if documents is None else documents
    columns = np.array(query.T, dtype=np.float32, order="C")
    return scores(
        tokens,
        offsets,
        chosen,
        lambda rows: float32_products(rows, columns),
        query_tokens=len(query),
        itemsize=4,
    )


def take_rows(table: TokenRows, positions: NDArray[np.intp]) -> TokenRows:
    """Return table[positions] without bounds checks, ten times faster."""
    found = np.empty((*positions.shape, *table.shape[1:]), table.dtype)
    np.take(table, positions, axis=0, out=found, mode="clip")
    return found


def float32_products(rows: TokenRows, columns: Vectors) -> Vectors:
    """Return rows @ columns in float32. Both are writable arrays.

    torch converts float16 with a CPU instruction, numpy in software. numpy's BLAS has its own
    threads, which spin for milliseconds after each product and slow down those of torch.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return rows.astype(np.float32) @ columns
    # On CPUs, converting first is a hundred times as fast as multiplying in half precision.
    found: Vectors = (torch.from_numpy(rows).float() @ torch.from_numpy(columns)).numpy()
    return found


def sums_of_maxima(products: TokenRows) -> TokenRows:
    """Reduce (documents, document tokens, query tokens) to (documents,). Overwrites the products.

    Halves are compared with each other, which is three times as fast as numpy's maximum over the
    axis.
    """
    while (count := products.shape[1]) > 1:
        half = count // 2
        kept = products[:, :half]
        np.maximum(kept, products[:, half : 2 * half], out=kept)
        if count % 2:
            np.maximum(kept[:, :1], products[:, -1:], out=kept[:, :1])
        products = kept
    dtype = np.int32 if products.dtype == np.uint8 else np.float32
    sums: TokenRows = products[:, 0].sum(axis=-1, dtype=dtype)
    return sums
