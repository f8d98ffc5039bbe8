"""An image as it arrived: encoded bytes, hashed once, decoded only when somebody looks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from PIL import Image as Pillow
from PIL import PngImagePlugin

from bottega import pixels
from bottega.errors import ImageError, TooManyPixelsError
from bottega.jpeg_scans import is_header_slow

MAX_PIXELS = 80_000_000
MAX_BYTES = 128 * 1024 * 1024
# Tiny images are decoded once; a folder of decoded photographs would not fit into memory.
KEEP_DECODED_UP_TO = 64 * 64
# Decoders inside Pillow; the JPEG one reads MPO too. Of the others some start programs: an EPS
# file that is named .jpg would be run by Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# What vision endpoints accept as it is; everything else is encoded anew.
WIRE_FORMATS = {"JPEG", "PNG", "WEBP"}
WIRE_MODES = {"1", "L", "P", "RGB"}
# Endpoints reduce to this or less, after everybody has waited for the upload.
WIRE_SIDE = 2048
# Maximum bytes of decompressed text in a PNG file. Pillow reads the text with the header, outside
# any memory budget, and allows 64 MB.
MAX_TEXT = 1 << 20
# Enough to find damage anywhere in the body, and quick for large photographs.
CHECKED_SIDE = 64


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
        name = path_text(path)
        try:
            data = _read(Path(path), name)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or error
            raise ImageError(f"{name} cannot be read: {reason}", hint="check the path") from error
        return cls.from_bytes(data, source=name)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str | None = None) -> Image:
        name = source or "the image"
        if not data:
            raise ImageError(f"{name} is empty (zero bytes)", hint="copy the file again")
        if len(data) > MAX_BYTES:
            raise ImageError(f"{name} is larger than {MAX_BYTES >> 20} MB", hint=SMALLER)
        if data.startswith(b"\xff\xd8") and is_header_slow(data):
            raise ImageError(
                f"{name} has too many markers or fill bytes in its JPEG header",
                hint="export the image again",
            )
        opened = _header(data, name)
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise TooManyPixelsError(
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
        return cls.from_bytes(pixels.png(picture), source=source)

    def decode(self, at_least: int | None = None) -> Pillow.Image:
        """Upright RGB pixels without metadata: first frame, EXIF rotation applied where it can be
        read, alpha over white.

        16-bit values are divided by 257. 32-bit integers are taken as 8 or 16 bit if all fit, and
        floats as 0 to 1 or 0 to 255; otherwise the finite minimum becomes black and the maximum
        white. NaN is the minimum.

        With `at_least`, an image may come back reduced (1/2, 1/4 or 1/8) as long as both sides
        keep that many pixels: decoding a photo for a small encoder is then many times faster.
        Raises `ImageError` if the body is damaged. Do not draw on the result: it may be shared.
        """
        if self.width * self.height > KEEP_DECODED_UP_TO:
            return self._decode(at_least)
        # Not `cached_property`: in Python 3.11 all images would wait for one lock.
        decoded: Pillow.Image | None = self.__dict__.get("_decoded")
        if decoded is None:
            decoded = self.__dict__["_decoded"] = self._decode(None)
        return decoded

    def decode_for_model(self) -> Pillow.Image:
        """Return the pixels of `decode` for a model that takes images of any size. An image of more
        than `pixels.LARGE_PIXELS` pixels is reduced to 2048 pixels on a side, as for endpoints."""
        return self._reduced_for_wire() if self.is_large else self.decode()

    @property
    def is_large(self) -> bool:
        """Return whether it has more than `pixels.LARGE_PIXELS` pixels."""
        return self.width * self.height > pixels.LARGE_PIXELS

    def decode_cost(self, at_least: int | None = None) -> pixels.DecodeCost:
        """Estimate the memory of `decode(at_least)` in bytes from the header."""
        return pixels.decode_cost(_header(self.data, self._name), self.data, at_least)

    def wire_cost(self) -> pixels.DecodeCost:
        """Estimate the memory of `data_url` in bytes from the header."""
        return self.decode_cost(self._wire_at_least)

    def strips_cost(self) -> pixels.DecodeCost:
        """Estimate the memory of `rgb_strips` in bytes from the header."""
        return pixels.DecodeCost(self.decode_cost().peak, result=0)

    def rgb_strips(self) -> Iterator[Pillow.Image]:
        """Yield the pixels of `decode()` from top to bottom, a few rows at a time. The whole image
        is never held as RGB, unless it has to be rotated. Raises `ImageError`."""
        picture = self._loaded(None)
        with _naming_damage(self._name):
            turn = pixels.turn(picture)
            if pixels.is_deep(picture):
                picture = pixels.eight_bits(picture)
            if turn is not None:
                picture = pixels.rgb(picture).transpose(turn)
            for _, strip in pixels.strips(picture):
                yield pixels.rgb(strip)

    def apart(self) -> Image:
        """An equal image that has the pixels which this one has decoded, while this one keeps
        nothing of what the other decodes."""
        other = replace(self)
        if "_decoded" in self.__dict__:
            other.__dict__["_decoded"] = self.__dict__["_decoded"]
        return other

    @property
    def data_url(self) -> str:
        """The image for a vision endpoint: the original bytes where every server reads them.

        Otherwise (rotated by EXIF, CMYK, 16 bit, alpha, animated, other formats, more than 2048
        pixels on a side) it is decoded, reduced to 2048 pixels on a side, as endpoints do anyway,
        and encoded as PNG up to 512 x 512 pixels, as JPEG above.
        """
        url: str | None = self.__dict__.get("_data_url")
        if url is None:
            url = self.__dict__["_data_url"] = self._encode_data_url()
        return url

    def _encode_data_url(self) -> str:
        media_type, data = self.media_type, self.data
        if max(self.width, self.height) > WIRE_SIDE or not self._travels_as_it_is():
            media_type, data = pixels.encoded(self._reduced_for_wire())
        return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"

    @property
    def _name(self) -> str:
        return self.source or "the image"

    def _travels_as_it_is(self) -> bool:
        # Loaded, because a damaged body is the caller's error, not the server's.
        picture = self._loaded(CHECKED_SIDE)
        return (
            picture.format in WIRE_FORMATS
            and picture.mode in WIRE_MODES
            and getattr(picture, "n_frames", 1) == 1
            and pixels.turn(picture) is None
            and "transparency" not in picture.info
        )

    @property
    def _wire_at_least(self) -> int | None:
        longer, shorter = max(self.width, self.height), min(self.width, self.height)
        return max(1, shorter * WIRE_SIDE // longer) if longer > WIRE_SIDE else None

    def _reduced_for_wire(self) -> Pillow.Image:
        if self._wire_at_least is None:
            return self.decode()
        picture = self.decode(self._wire_at_least).copy()
        picture.thumbnail((WIRE_SIDE, WIRE_SIDE))
        return picture

    def _loaded(self, at_least: int | None) -> Pillow.Image:
        picture = _header(self.data, self._name)
        with _naming_damage(self._name):
            if at_least is not None:
                picture.draft("RGB", (at_least, at_least))
            picture.load()
        return picture

    def _decode(self, at_least: int | None) -> Pillow.Image:
        picture = self._loaded(at_least)
        with _naming_damage(self._name):
            turn = pixels.turn(picture)
            if pixels.is_deep(picture):
                picture = pixels.eight_bits(picture)
            # A smaller size is the JPEG decoder's work: all formats are reduced alike.
            if at_least is not None and picture.size == (self.width, self.height):
                picture = pixels.reduced(picture, at_least)
            picture = pixels.rgb(picture)
            picture.info.clear()
            return picture if turn is None else picture.transpose(turn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


SMALLER = "reduce the image first"


def path_text(path: str | Path) -> str:
    """File names are bytes: what is not UTF-8 in them could be neither shown nor stored as text."""
    return str(path).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(path: Path, name: str) -> bytes:
    """No more than one byte too many: the size that a file states may be wrong, as in /proc."""
    if not stat.S_ISREG(path.stat().st_mode):  # devices and pipes may never end
        raise ImageError(f"{name} is not a regular file", hint="check the path")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


@cache
def _formats() -> tuple[str, ...]:
    Pillow.init()
    # Pillow has only this process-wide setting. Keep a lower limit set by the host program.
    PngImagePlugin.MAX_TEXT_MEMORY = min(PngImagePlugin.MAX_TEXT_MEMORY, MAX_TEXT)
    return tuple(name for name in FORMATS if name in Pillow.OPEN)


def _header(data: bytes, name: str) -> Pillow.Image:
    try:
        return Pillow.open(io.BytesIO(data), formats=_formats())
    except Pillow.DecompressionBombError as error:
        raise TooManyPixelsError(
            f"{name} has more than {MAX_PIXELS:,} pixels", hint=SMALLER
        ) from error
    except Exception as error:  # same boundary as in `_naming_damage`
        raise ImageError(
            f"{name} is not an image that can be read: {_reason(error)}",
            hint="use JPEG, PNG, WebP, GIF, BMP or TIFF",
        ) from error


@contextmanager
def _naming_damage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow's decoders raise dozens of types on damaged bytes
        raise ImageError(
            f"{name} is damaged: {_reason(error)}", hint="export the image again"
        ) from error


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "unknown format" if text.startswith("cannot identify") else text
