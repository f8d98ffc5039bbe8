"""Recognition of photographs among drawings, characters and synthetic scenes.

Embedders, generators and the selection of their defaults share it.
"""

from __future__ import annotations

import numpy as np

from bottega.errors import ImageError
from bottega.image import Image

LOSSY_TYPES = {"image/jpeg", "image/webp", "image/avif", "image/heic"}
# Images of the synthetic tasks and the digits are smaller and never in a lossy format.
LARGE_SIDE = 128
ANALYSIS_SIDE = 64
MIN_SPREAD, MIN_COLOURS = 4.0, 150  # mean range across channels; distinct colours out of 32,768


def is_photograph(image: Image) -> bool:
    """Return whether the image has many colours, and a lossy format or more than `LARGE_SIDE`
    pixels a side. Grey photographs, and small ones in lossless formats, are not recognised."""
    if not may_be_photograph(image):
        return False
    try:
        small = image.decode(2 * ANALYSIS_SIDE).convert("RGB")
    except ImageError:
        return False  # the model will report it
    small.thumbnail((ANALYSIS_SIDE, ANALYSIS_SIDE))
    pixels = np.asarray(small, dtype=np.int16)
    spread = float(np.ptp(pixels, axis=2).mean())
    colours = len(np.unique((pixels // 8).reshape(-1, 3), axis=0))
    return spread >= MIN_SPREAD and colours >= MIN_COLOURS


def may_be_photograph(image: Image) -> bool:
    """Return False for images that `is_photograph` rejects without decoding them."""
    return image.media_type in LOSSY_TYPES or min(image.width, image.height) > LARGE_SIDE
