"""Conversions and costs of decoded pixels, and checks of JPEG headers."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow
from PIL import features

# A photograph as PNG is ten times larger than as JPEG.
PNG_UP_TO = 512 * 512
JPEG_QUALITY = 92
THUMBNAIL_QUALITY = 72
TINY = 48  # thumbnails up to this side are shown pixel by pixel
PNG_MODES = {"1", "L", "LA", "I", "P", "RGB", "RGBA"}
PNG_MODE_FOR = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA", "RGBX": "RGB"}
REDUCIBLE_MODES = {"L", "LA", "RGB", "RGBA", "CMYK"}
STRIP_PIXELS = 1 << 20
# Larger than most photographs. Smaller images are decoded as in earlier versions, so stored
# embeddings stay valid; larger ones are reduced to save memory.
LARGE_PIXELS = 16_000_000
# Image processors enlarge the shorter side: 1 x 4,000 pixels would become 224 x 896,000.
MAX_RATIO = 20
# Peak bytes per pixel while Pillow decodes, measured (docs/log.md): codecs hold buffers
# in addition to the raster. Unlisted formats hold only the raster.
CODEC_BYTES = {"WEBP": 16, "AVIF": 16, "JPEG2000": 26, "TIFF": 12}
MODE_BYTES = {"1": 1, "L": 1, "P": 1}
RGB_BYTES = 4  # Pillow stores a pixel of RGB in four bytes
COEFFICIENT_BYTES = 2  # per pixel and component of a JPEG with several scans, held until the last
SIGNATURE_SIZE = (17, 16)  # has 16 x 16 steps of brightness
MIN_CONTRAST = 16  # length of the steps of an almost uniform image
ORIENTATION = 0x0112
TRANSPOSES = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def upright_transpose(pil_image: Pillow.Image) -> Pillow.Transpose | None:
    """Return the transpose for the EXIF orientation, None if it is upright or unreadable."""
    try:
        return TRANSPOSES.get(pil_image.getexif().get(ORIENTATION, 1))
    except Exception:  # intact pixels with broken metadata are a valid image
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


def reduced(pil_image: Pillow.Image, at_least: int) -> Pillow.Image:
    """Reduce by 8, 4 or 2, the most that keeps both sides at `at_least` pixels."""
    scale = scale_of(pil_image.size, at_least)
    if scale == 1:
        return pil_image
    if _is_reducible(pil_image):
        return pil_image.reduce(scale)
    if pil_image.width * pil_image.height <= LARGE_PIXELS:
        return pil_image
    # Convert to RGB and reduce strip by strip: a palette or 1-bit image would take four times its
    # memory if converted to RGB as a whole.
    small = Pillow.new("RGB", (-(-pil_image.width // scale), -(-pil_image.height // scale)))
    for top, strip in strips(pil_image, multiple=scale):
        small.paste(rgb(strip).reduce(scale), (0, top // scale))
    return small


def centre(pil_image: Pillow.Image) -> Pillow.Image:
    """Return the image, or its centre if it is more than `MAX_RATIO` times as long as wide."""
    width, height = pil_image.size
    longest = MAX_RATIO * min(width, height)
    if max(width, height) <= longest:
        return pil_image
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return pil_image.crop((left, top, width - left, height - top))


def signature(pil_image: Pillow.Image) -> np.ndarray:
    """Return a tiny image, which copies of other sizes and encodings have almost the same."""
    small = pil_image.resize(SIGNATURE_SIZE, Pillow.Resampling.BILINEAR)
    return np.asarray(small, np.uint8)


def brightness_steps(signature: np.ndarray) -> np.ndarray:
    """Return the 256 horizontal steps of brightness of a signature as a vector of length 1, or
    shorter for an almost uniform image."""
    steps: np.ndarray = np.diff(signature.mean(axis=2, dtype=np.float32)).ravel()
    steps /= max(MIN_CONTRAST, float(np.linalg.norm(steps)))
    return steps


def is_deep(pil_image: Pillow.Image) -> bool:
    """Return whether the values have more than eight bits."""
    return pil_image.mode.startswith("I") or pil_image.mode == "F"


def _is_reducible(pil_image: Pillow.Image) -> bool:
    # A transparent colour would be mixed with its neighbours.
    return pil_image.mode in REDUCIBLE_MODES and "transparency" not in pil_image.info


def rgb(pil_image: Pillow.Image) -> Pillow.Image:
    """Convert to RGB, with transparent parts composed over white."""
    clear = pil_image.info.get("transparency")
    if isinstance(clear, tuple) and max(clear) > 255:  # of 16 bits; Pillow keeps the upper eight
        pil_image.info["transparency"] = tuple(value >> 8 for value in clear)
    if "A" in pil_image.getbands() or clear is not None:
        layer = pil_image if pil_image.mode in {"LA", "RGBA"} else pil_image.convert("RGBA")
        white = Pillow.new("RGB", layer.size, "white")
        white.paste(layer, mask=layer)
        return white
    return pil_image.convert("RGB")


def eight_bits(pil_image: Pillow.Image) -> Pillow.Image:
    """Convert integers of 16 or 32 bits and floats to 8-bit grey; a transparent value becomes
    white."""
    low, high = _range(pil_image)
    clear = pil_image.info.get("transparency")
    grey = Pillow.new("L", pil_image.size)
    for top, strip in strips(pil_image):
        values = np.asarray(strip, np.float64)
        finite = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
        scaled = (finite - low) * (255 / ((high - low) or 1))
        if clear is not None:
            scaled[values == clear] = 255
        grey.paste(Pillow.fromarray(scaled.round().astype(np.uint8)), (0, top))
    return grey


def is_faint(pil_image: Pillow.Image) -> bool:
    """Return whether a deep image spans less than 1 % of the values from black to white."""
    black, white = _range(pil_image)
    low, high = _extremes(pil_image)
    return high - low < (white - black) / 100


def _range(pil_image: Pillow.Image) -> tuple[float, float]:
    """Return the values that become black and white."""
    if pil_image.mode.startswith("I;16"):
        return 0, 65535
    low, high = _extremes(pil_image)
    usual = (1, 255) if pil_image.mode == "F" else (255, 65535)
    fitting = [white for white in usual if low >= 0 and high <= white]
    return (0, fitting[0]) if fitting else (low, high)


def _extremes(pil_image: Pillow.Image) -> tuple[float, float]:
    """Return the lowest and the highest finite value. Raises `ValueError` without one."""
    # Strip by strip: all pixels at once would take eight times the file or more.
    arrays = (np.asarray(strip, np.float64) for _, strip in strips(pil_image))
    finite = (values[np.isfinite(values)] for values in arrays)
    ends = [(float(values.min()), float(values.max())) for values in finite if values.size]
    if not ends:
        raise ValueError("all pixels are NaN or infinite")
    return min(low for low, _ in ends), max(high for _, high in ends)


def strips(pil_image: Pillow.Image, multiple: int = 1) -> Iterator[tuple[int, Pillow.Image]]:
    """Yield the image from top to bottom, a few rows at a time; only the last strip may have a
    number of rows that is not a `multiple`."""
    width, height = pil_image.size
    rows = max(1, STRIP_PIXELS // width)
    rows += -rows % multiple
    for top in range(0, height, rows):
        yield top, pil_image.crop((0, top, width, min(top + rows, height)))


def encoded(pil_image: Pillow.Image) -> tuple[str, bytes]:
    """Encode as PNG up to `PNG_UP_TO` pixels, else as JPEG. Return the media type and bytes."""
    if pil_image.width * pil_image.height <= PNG_UP_TO:
        return "image/png", png(pil_image)
    return "image/jpeg", _saved(pil_image, "JPEG", quality=JPEG_QUALITY)


def thumbnail(pil_image: Pillow.Image, side: int) -> bytes:
    """Return the smaller of PNG and WebP (JPEG without WebP support); never enlarge."""
    small = pil_image.copy()
    small.thumbnail((side, side), Pillow.Resampling.LANCZOS)
    exact = _saved(small, "PNG", optimize=True)
    if max(small.size) <= TINY:
        return exact
    lossy = _saved(small, "WEBP" if features.check("webp") else "JPEG", quality=THUMBNAIL_QUALITY)
    return min(exact, lossy, key=len)


def data_url(data: bytes) -> str:
    """Return a thumbnail as a data URL."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode('ascii')}"


def media_type(data: bytes) -> str:
    """Return the media type of a thumbnail."""
    kind = "png" if data.startswith(b"\x89PNG") else "webp" if data[8:12] == b"WEBP" else "jpeg"
    return f"image/{kind}"


def png_compatible(pil_image: Pillow.Image) -> Pillow.Image:
    """Return the image upright and in a mode that PNG supports."""
    transpose = upright_transpose(pil_image)
    if transpose is not None:
        pil_image = pil_image.transpose(transpose)
    if pil_image.mode in PNG_MODES or pil_image.mode.startswith("I;16"):
        return pil_image
    if pil_image.mode == "F":
        return eight_bits(pil_image)
    return pil_image.convert(PNG_MODE_FOR.get(pil_image.mode, "RGB"))


def png(pil_image: Pillow.Image) -> bytes:
    """Encode as PNG."""
    return _saved(pil_image, "PNG")


def _saved(pil_image: Pillow.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    pil_image.save(buffer, format, **options)
    return buffer.getvalue()


START_OF_SCAN = 0xDA
END_OF_FILE = -1
NOT_FRAMES = {0xC4, 0xC8, 0xCC}  # tables and an extension, between the markers of frames
SEQUENTIAL = {0xC0, 0xC1, 0xC9}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD8)}
FILL = re.compile(rb"\xff+")  # any number of fill bytes may precede a marker
# Pillow reads the bytes between segments one by one in Python: 16 KB take it about 15 ms.
MAX_STEPS = 1 << 14


def has_several_scans(data: bytes) -> bool:
    """Return whether libjpeg holds the coefficients of the whole image: the frame is progressive,
    or its first scan lacks a component. True also if the first scan cannot be read."""
    components, sequential = 0, False
    for marker, at, _ in _markers(data):
        segment = data[at : at + 8]
        if len(segment) < 8:
            break
        if marker == START_OF_SCAN:
            return not sequential or segment[2] < components
        if 0xC0 <= marker <= 0xCF and marker not in NOT_FRAMES:
            components, sequential = segment[7], marker in SEQUENTIAL
    return True


def is_header_slow(data: bytes) -> bool:
    """Return whether markers, and bytes between segments, before the first scan are more than
    `MAX_STEPS` together."""
    steps = 0
    for _, _, skipped in _markers(data):
        steps += 1 + skipped
        if steps > MAX_STEPS:
            return True
    return False


def _markers(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the markers up to the first scan: their code, the position after them, and the number
    of bytes skipped before them. Without a scan, the end of the file is the last marker."""
    at = 2
    while (fill := FILL.search(data, at)) and fill.end() < len(data):
        marker, content = data[fill.end()], fill.end() + 1
        yield marker, content, content - at - 2
        if marker == START_OF_SCAN:
            return
        at = content
        if marker not in WITHOUT_LENGTH:
            at += int.from_bytes(data[content : content + 2], "big")
    yield END_OF_FILE, len(data), len(data) - at
