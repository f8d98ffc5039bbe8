"""What is done to decoded pixels: upright, RGB, eight bits, smaller, encoded again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from bottega.jpeg_scans import has_several_scans

# A photograph as PNG is ten times larger than as JPEG.
PNG_UP_TO = 512 * 512
JPEG_QUALITY = 92
REDUCIBLE_MODES = {"L", "LA", "RGB", "RGBA", "CMYK"}
STRIP_PIXELS = 1 << 20
# Larger than most photographs. Smaller images are decoded as in earlier versions, so stored
# embeddings stay valid; larger ones are reduced to save memory.
LARGE_PIXELS = 16_000_000
# Peak bytes per pixel while Pillow decodes, measured (docs/log.md): codecs hold buffers
# in addition to the raster. Unlisted formats hold only the raster.
CODEC_BYTES = {"WEBP": 16, "AVIF": 16, "JPEG2000": 26, "TIFF": 12}
MODE_BYTES = {"1": 1, "L": 1, "P": 1}
RGB_BYTES = 4  # Pillow stores a pixel of RGB in four bytes
COEFFICIENT_BYTES = 2  # per pixel and component of a JPEG with several scans, held until the last
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


@dataclass(frozen=True)
class DecodeCost:
    """Memory of decoding in bytes: its peak, and the size of the result."""

    peak: int
    result: int


def decode_cost(header: Pillow.Image, data: bytes, at_least: int | None) -> DecodeCost:
    """Estimate the memory of `Image.decode(at_least)` from an opened but not decoded image and the
    bytes of its file."""
    count = header.width * header.height
    scale = 1 if at_least is None else scale_of(header.size, at_least)
    if header.format in {"JPEG", "MPO"}:  # an MPO file begins with its first frame as JPEG
        result = RGB_BYTES * count // scale**2  # the JPEG decoder itself reduces
        held = COEFFICIENT_BYTES * len(header.getbands()) if has_several_scans(data) else 0
        return DecodeCost(held * count + 2 * result, result)
    raster = CODEC_BYTES.get(header.format or "", MODE_BYTES.get(header.mode, RGB_BYTES)) * count
    if not (_is_reducible(header) or is_deep(header) or count > LARGE_PIXELS):
        scale = 1
    result = RGB_BYTES * count // scale**2
    whole = scale == 1 and "transparency" in header.info
    layer = RGB_BYTES * count if whole or "A" in header.getbands() else 0
    if is_deep(header):  # several copies of one strip as float64
        layer += 32 * min(count, STRIP_PIXELS)
    return DecodeCost(raster + layer + result, result)


def scale_of(size: tuple[int, int], at_least: int) -> int:
    """Return 8, 4, 2 or 1: the largest reduction that keeps both sides at `at_least` pixels."""
    return next((scale for scale in (8, 4, 2) if min(size) >= scale * at_least), 1)


def reduced(picture: Pillow.Image, at_least: int) -> Pillow.Image:
    """By 8, 4 or 2, as long as both sides keep `at_least` pixels."""
    scale = scale_of(picture.size, at_least)
    if scale == 1:
        return picture
    if _is_reducible(picture):
        return picture.reduce(scale)
    large = picture.width * picture.height > LARGE_PIXELS
    return _reduced_in_strips(picture, scale) if large else picture


def is_deep(picture: Pillow.Image) -> bool:
    """Return whether its values have more than eight bits."""
    return picture.mode.startswith("I") or picture.mode == "F"


def _is_reducible(picture: Pillow.Image) -> bool:
    # A transparent colour would be mixed with its neighbours.
    return picture.mode in REDUCIBLE_MODES and "transparency" not in picture.info


def _reduced_in_strips(picture: Pillow.Image, scale: int) -> Pillow.Image:
    """Convert to RGB and reduce strip by strip: a palette or 1-bit image would take four times its
    memory if converted to RGB as a whole."""
    width, height = (-(-side // scale) for side in picture.size)
    small = Pillow.new("RGB", (width, height))
    for top, strip in strips(picture, multiple=scale):
        small.paste(rgb(strip).reduce(scale), (0, top // scale))
    return small


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
    for top, values in _values(picture):
        finite = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
        scaled = (finite - low) * (255 / ((high - low) or 1))
        grey.paste(Pillow.fromarray(scaled.round().astype(np.uint8)), (0, top))
    return grey


def _range(picture: Pillow.Image) -> tuple[float, float]:
    """What becomes black, and what white."""
    if picture.mode.startswith("I;16"):
        return 0, 65535
    finite = (values[np.isfinite(values)] for _, values in _values(picture))
    ends = [(float(values.min()), float(values.max())) for values in finite if values.size]
    if not ends:
        raise ValueError("no pixel is a finite number")
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    usual = (1, 255) if picture.mode == "F" else (255, 65535)
    fitting = [white for white in usual if low >= 0 and high <= white]
    return (0, fitting[0]) if fitting else (low, high)


def strips(picture: Pillow.Image, multiple: int = 1) -> Iterator[tuple[int, Pillow.Image]]:
    """Yield the image from top to bottom, a few rows at a time; only the last strip may have a
    number of rows that is not a `multiple`."""
    width, height = picture.size
    rows = max(1, STRIP_PIXELS // width)
    rows += -rows % multiple
    for top in range(0, height, rows):
        yield top, picture.crop((0, top, width, min(top + rows, height)))


def _values(picture: Pillow.Image) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield strips as float64: all pixels at once would take eight times the file or more."""
    for top, strip in strips(picture):
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
