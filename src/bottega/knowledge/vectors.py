from __future__ import annotations

import numpy as np

from bottega.protocols import Vectors

TINY = np.finfo(np.float32).tiny


def unit(rows: Vectors) -> Vectors:
    """Rows of length one; a row of zeros stays."""
    # Not np.linalg.norm, which takes longer to begin than this to end.
    lengths = np.sqrt((rows * rows).sum(axis=-1, keepdims=True))
    scaled: Vectors = rows / np.maximum(lengths, TINY)
    return scaled.astype(np.float32, copy=False)
