"""Recognition of photographs among drawings, characters and synthetic scenes.

Embedders, generators and the choice of their defaults use it, so it belongs to none of them.
"""

from __future__ import annotations

import numpy as np

from bottega.errors import ImageError
from bottega.image import Image

LOSSY = {"image/jpeg", "image/webp", "image/avif", "image/heic"}
# Images of the synthetic tasks and the digits are smaller and never in a lossy format.
LARGE = 128
SIDE = 64
LEAST_SPREAD, LEAST_COLOURS = 4.0, 150  # mean range across channels; distinct colours out of 32,768


def is_photograph(image: Image) -> bool:
    """Return whether the image has many colours, and a lossy format or more than `LARGE` pixels a
    side. Grey photographs, and small ones in lossless formats, are not recognised."""
    if not may_be_photograph(image):
        return False
    try:
        small = image.decode(2 * SIDE).convert("RGB")
    except ImageError:
        return False  # the model will report it
    small.thumbnail((SIDE, SIDE))
    pixels = np.asarray(small, dtype=np.int16)
    spread = float(np.ptp(pixels, axis=2).mean())
    colours = len(np.unique((pixels // 8).reshape(-1, 3), axis=0))
    return spread >= LEAST_SPREAD and colours >= LEAST_COLOURS


def may_be_photograph(image: Image) -> bool:
    """Return False for images that `is_photograph` rejects without decoding them."""
    return image.media_type in LOSSY or min(image.width, image.height) > LARGE
