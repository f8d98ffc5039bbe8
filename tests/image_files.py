"""Builders of image files for tests."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image as Pillow


def encoded(image: Pillow.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int = 64, height: int = 48) -> Pillow.Image:
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(values)


def segment(marker: int, content: bytes) -> bytes:
    """Return a segment of a JPEG file."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content
