"""An image as it arrived: encoded bytes, hashed once, decoded only when somebody looks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from bottega.errors import ImageError

MAX_PIXELS = 80_000_000
MAX_BYTES = 128 * 1024 * 1024
# Small images are decoded once; a thousand decoded photos would not fit into memory.
KEEP_DECODED_UP_TO = 256 * 256
# What vision endpoints accept as it is; everything else travels as PNG.
WIRE_FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
WIRE_MODES = {"1", "L", "P", "RGB"}
ORIENTATION = 0x0112


@dataclass(frozen=True, eq=False)
class Image:
    """Encoded image bytes with their media type and sha256. Equal if the bytes are equal.

    Build one with `open`, `from_bytes`, `from_data_url` or `from_pillow`; each checks the header
    and raises `ImageError` for what is not an image or has more than `MAX_PIXELS` pixels.
    A damaged body shows only in `decode`.
    """

    data: bytes = field(repr=False)
    media_type: str
    sha256: str
    width: int
    height: int
    source: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> Image:
        path = Path(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ImageError(f"{path} is larger than {MAX_BYTES >> 20} MB", hint=SMALLER)
            data = path.read_bytes()
        except OSError as error:
            raise ImageError(
                f"{path} cannot be read: {error.strerror}", hint="check the path"
            ) from error
        return cls.from_bytes(data, source=str(path))

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str | None = None) -> Image:
        name = source or "the image"
        if not data:
            raise ImageError(f"{name} is empty (zero bytes)", hint="copy the file again")
        if len(data) > MAX_BYTES:
            raise ImageError(f"{name} is larger than {MAX_BYTES >> 20} MB", hint=SMALLER)
        opened = _header(data, name)
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise ImageError(
                f"{name} has {width} x {height} pixels, more than {MAX_PIXELS:,}", hint=SMALLER
            )
        media_type = Pillow.MIME.get(opened.format or "", "application/octet-stream")
        return cls(data, media_type, hashlib.sha256(data).hexdigest(), width, height, source)

    @classmethod
    def from_data_url(cls, url: str, *, source: str | None = None) -> Image:
        """`data:image/png;base64,...`, or the bare base64 text."""
        payload = url.partition(",")[2] if url.startswith("data:") else url
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(
                f"{source or 'the image'} is not valid base64", hint="encode the file's bytes"
            ) from error
        return cls.from_bytes(data, source=source)

    @classmethod
    def from_pillow(cls, picture: Pillow.Image, *, source: str | None = None) -> Image:
        return cls.from_bytes(_png(picture), source=source)

    def decode(self, at_least: int | None = None) -> Pillow.Image:
        """Upright RGB pixels: first frame, EXIF rotation applied, alpha over white, 16 bit to 8.

        With `at_least`, a JPEG may come back reduced (1/2, 1/4 or 1/8) as long as both sides keep
        that many pixels: decoding a photo for a small encoder is then many times faster.
        Raises `ImageError` if the body is damaged. Do not draw on the result: it may be shared.
        """
        if self.width * self.height <= KEEP_DECODED_UP_TO:
            return self._decoded
        return self._decode(at_least)

    @cached_property
    def data_url(self) -> str:
        """The image for a vision endpoint: the original bytes where every server reads them,
        else (rotated by EXIF, CMYK, 16 bit, alpha, animated, other formats) decoded, as PNG."""
        decoded = self.decode()  # a damaged body is the caller's error, not the server's
        picture = _header(self.data, self._name)
        plain = (
            picture.format in WIRE_FORMATS
            and picture.mode in WIRE_MODES
            and getattr(picture, "n_frames", 1) == 1
            and picture.getexif().get(ORIENTATION, 1) == 1
            and "transparency" not in picture.info
        )
        media_type, data = (self.media_type, self.data) if plain else ("image/png", _png(decoded))
        return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"

    @cached_property
    def _decoded(self) -> Pillow.Image:
        return self._decode(None)

    @property
    def _name(self) -> str:
        return self.source or "the image"

    def _decode(self, at_least: int | None) -> Pillow.Image:
        picture = _header(self.data, self._name)
        try:
            if at_least is not None:
                picture.draft("RGB", (at_least, at_least))
            picture.load()
            return _rgb(ImageOps.exif_transpose(picture))
        except Exception as error:  # Pillow's decoders raise dozens of types on damaged bytes
            raise ImageError(
                f"{self._name} is damaged: {_reason(error)}", hint="export the image again"
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


SMALLER = "reduce the image first"


def _header(data: bytes, name: str) -> Pillow.Image:
    try:
        return Pillow.open(io.BytesIO(data))
    except Exception as error:  # same boundary as in `_decode`
        too_large = isinstance(error, Pillow.DecompressionBombError)
        raise ImageError(
            f"{name} is not an image that can be read: {_reason(error)}",
            hint=SMALLER if too_large else "use JPEG, PNG, WebP, GIF, BMP or TIFF",
        ) from error


def _rgb(picture: Pillow.Image) -> Pillow.Image:
    if picture.mode.startswith("I") or picture.mode == "F":
        picture = _eight_bits(picture)
    if "A" in picture.getbands() or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        white = Pillow.new("RGBA", layer.size, "white")
        return Pillow.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(picture: Pillow.Image) -> Pillow.Image:
    """16-bit integers divide by 256; 32-bit and float images are stretched to their range."""
    values = np.asarray(picture, dtype=np.float64)
    if picture.mode.startswith("I;16") or (picture.mode == "I" and 255 < values.max() <= 65535):
        values = values / 257.0
    elif picture.mode == "F" and values.max() <= 1.0:
        values = values * 255.0
    return Pillow.fromarray(np.clip(values, 0, 255).round().astype(np.uint8))


def _png(picture: Pillow.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "unknown format" if text.startswith("cannot identify") else text
