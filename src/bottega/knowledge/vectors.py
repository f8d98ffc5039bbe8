from __future__ import annotations

import numpy as np

from bottega.protocols import Vectors


def unit(rows: Vectors) -> Vectors:
    """Rows of length one; a row of zeros stays."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    scaled: Vectors = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled.astype(np.float32, copy=False)
