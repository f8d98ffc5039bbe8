"""Image files that many tests build with."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image as Pillow


def encoded(picture: Pillow.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int = 64, height: int = 48) -> Pillow.Image:
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(values)
