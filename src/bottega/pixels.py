"""What is done to decoded pixels: upright, RGB, eight bits, smaller, encoded again."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

# A photograph as PNG is ten times larger than as JPEG.
PNG_UP_TO = 512 * 512
JPEG_QUALITY = 92
REDUCIBLE_MODES = {"L", "LA", "RGB", "RGBA", "CMYK"}
STRIP_PIXELS = 1 << 20
ORIENTATION = 0x0112
TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def turn(picture: Pillow.Image) -> Pillow.Transpose | None:
    """What makes it upright, by its EXIF orientation; None if it is, or if that cannot be read."""
    try:
        return TURNS.get(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # sound pixels beside broken metadata are a sound picture
        return None


def reduced(picture: Pillow.Image, at_least: int) -> Pillow.Image:
    """By 8, 4 or 2, as long as both sides keep `at_least` pixels."""
    scale = next((scale for scale in (8, 4, 2) if min(picture.size) >= scale * at_least), 1)
    # A transparent colour would be mixed with its neighbours.
    if scale == 1 or picture.mode not in REDUCIBLE_MODES or "transparency" in picture.info:
        return picture
    return picture.reduce(scale)


def rgb(picture: Pillow.Image) -> Pillow.Image:
    """Transparency over white."""
    if "A" in picture.getbands() or "transparency" in picture.info:
        layer = picture if picture.mode in {"LA", "RGBA"} else picture.convert("RGBA")
        white = Pillow.new("RGB", layer.size, "white")
        white.paste(layer, mask=layer)
        return white
    return picture.convert("RGB")


def eight_bits(picture: Pillow.Image) -> Pillow.Image:
    """Integers of 16 or 32 bits and floats as grey of 8 bits."""
    low, high = _range(picture)
    grey = Pillow.new("L", picture.size)
    for top, values in _strips(picture):
        finite = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
        scaled = (finite - low) * (255 / ((high - low) or 1))
        grey.paste(Pillow.fromarray(scaled.round().astype(np.uint8)), (0, top))
    return grey


def _range(picture: Pillow.Image) -> tuple[float, float]:
    """What becomes black, and what white."""
    if picture.mode.startswith("I;16"):
        return 0, 65535
    finite = (values[np.isfinite(values)] for _, values in _strips(picture))
    ends = [(float(values.min()), float(values.max())) for values in finite if values.size]
    if not ends:
        raise ValueError("no pixel is a finite number")
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    usual = (1, 255) if picture.mode == "F" else (255, 65535)
    fitting = [white for white in usual if low >= 0 and high <= white]
    return (0, fitting[0]) if fitting else (low, high)


def _strips(picture: Pillow.Image) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """A few rows at a time: all pixels as float64 would be eight times the file and more."""
    width, height = picture.size
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = picture.crop((0, top, width, min(top + rows, height)))
        yield top, np.asarray(strip, np.float64)


def encoded(picture: Pillow.Image) -> tuple[str, bytes]:
    """Media type and bytes."""
    if picture.width * picture.height <= PNG_UP_TO:
        return "image/png", png(picture)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return "image/jpeg", buffer.getvalue()


def png(picture: Pillow.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
