"""What an embedder gave, before it is stored or compared."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bottega.errors import EmbeddingError
from bottega.protocols import Vectors

# Tokens are kept in float16, which holds no more.
LARGEST = float(np.finfo(np.float16).max)


def check_tokens(of: str, rows: Vectors, dimension: int) -> None:
    """Raises `EmbeddingError` unless they are (tokens, dimension) numbers that float16 holds."""
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise EmbeddingError(
            f"the tokens of {of} are {rows.shape}, not (tokens, {dimension})",
            hint="give the embedder that the index was made for",
        )
    if not np.isfinite(rows).all():
        raise EmbeddingError(f"the tokens of {of} are not all finite", hint="check the embedder")
    if len(rows) and float(np.abs(rows).max()) > LARGEST:
        raise EmbeddingError(
            f"the tokens of {of} hold numbers beyond {LARGEST:.0f}",
            hint="scale them, as to unit length",
        )


def one_for_each(made: Iterable[Vectors], count: int) -> list[Vectors]:
    """Raises `EmbeddingError` unless there are as many as texts were embedded."""
    found = list(made)
    if len(found) != count:
        raise EmbeddingError(
            f"the embedder gave the tokens of {len(found)} queries, not of {count}",
            hint="it must give one matrix for each, an empty one where there are no tokens",
        )
    return found
