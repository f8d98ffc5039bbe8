"""Image: the original encoded bytes with their hash, decoded on demand."""

from __future__ import annotations

import binascii
import hashlib
import io
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import IO

import pybase64
from PIL import Image as Pillow
from PIL import JpegImagePlugin, PngImagePlugin

from bottega import notebook, pixels
from bottega.errors import ImageError, TooManyPixelsError
from bottega.pixels import is_header_slow

MAX_PIXELS = 80_000_000
# JPEG files, the format of most large photographs, can be reduced while they are decoded.
MAX_JPEG_PIXELS = 120_000_000
MAX_BYTES = 128 * 1024 * 1024
# Tiny images are decoded once; a folder of decoded photographs would not fit into memory.
KEEP_DECODED_UP_TO = 64 * 64
# Decoders built into Pillow; the JPEG decoder reads MPO too. Some other decoders start programs:
# Ghostscript would run an EPS file named .jpg.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# Vision endpoints accept these unchanged. Other formats and modes are re-encoded.
WIRE_FORMATS = {"JPEG", "PNG", "WEBP"}
WIRE_MODES = {"1", "L", "P", "RGB"}
# Endpoints reduce images to this side length or less after the upload, so reduce before it.
WIRE_SIDE = 2048
# Maximum bytes of decompressed text in a PNG file. Pillow reads the text with the header, outside
# any memory budget, and allows 64 MB.
MAX_TEXT = 1 << 20
# Decoding to this side length finds damage anywhere in the body and is fast for large photographs.
CHECKED_SIDE = 64
# Image processors enlarge the shorter side: 1 x 4,000 pixels would become 224 x 896,000.
MAX_RATIO = 20
SMALLER = "reduce the image first"
JPEG_MARKER = b"\xff\xd8\xff"
JPEG_FORMATS = {"JPEG", "MPO"}
HEIC = re.compile(rb".{4}ftyp(?:he[ivm][cmsx]|mif1|msf1)", re.DOTALL)
FROM_HEIC = (
    "convert it to JPEG, for example with Pillow and pip install pillow-heif; phones can store new"
    " photographs as JPEG"
)


@dataclass(frozen=True, eq=False)
class Image:
    """Encoded image bytes with their media type and sha256. Equal if the bytes are equal.

    Build one with `open`, `from_bytes`, `from_data_url` or `from_pillow`. Each checks the header
    and raises `ImageError` for data that is no image or has more than `MAX_PIXELS` pixels (JPEG:
    `MAX_JPEG_PIXELS`). Only `decode` detects a damaged body.
    """

    data: bytes = field(repr=False)
    media_type: str
    sha256: str
    width: int
    height: int
    source: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> Image:
        """Read an image file. Raises `ImageError`."""
        name = path_text(path)
        try:
            if not stat.S_ISREG(Path(path).stat().st_mode):  # devices and pipes may never end
                raise ImageError(f"{name} is not a regular file", hint="check the path")
            with Path(path).open("rb") as file:
                # One byte more than allowed: a file's stated size may be wrong, as in /proc.
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or error
            raise ImageError(f"{name} cannot be read: {reason}", hint="check the path") from error
        return cls.from_bytes(data, source=name)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str | None = None) -> Image:
        """Wrap the bytes of an image file. `source` names the image in errors and demonstrations.
        Raises `ImageError`."""
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
        most = MAX_JPEG_PIXELS if opened.format in JPEG_FORMATS else MAX_PIXELS
        if width * height > most:
            raise TooManyPixelsError(
                f"{name} has {width} x {height} pixels, more than {most:,}", hint=SMALLER
            )
        media_type = Pillow.MIME.get(opened.format or "", "application/octet-stream")
        return cls(data, media_type, hashlib.sha256(data).hexdigest(), width, height, source)

    @classmethod
    def from_data_url(cls, url: str, *, source: str | None = None) -> Image:
        """Decode `data:image/png;base64,...` or bare base64 text. Raises `ImageError`."""
        payload = url
        if url[:5].lower() == "data:":
            comma = url.find(",")
            payload = url[comma + 1 :] if comma >= 0 else ""
        try:
            data = pybase64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(
                f"{source or 'the image'} is not valid base64", hint="encode the file's bytes"
            ) from error
        return cls.from_bytes(data, source=source)

    @classmethod
    def from_pillow(cls, pil_image: Pillow.Image, *, source: str | None = None) -> Image:
        """Encode a PIL image as PNG, rotated by its EXIF orientation. Raises `ImageError`."""
        try:
            data = pixels.png(pixels.png_compatible(pil_image))
        except (AttributeError, OSError, ValueError) as error:  # no image, or one without pixels
            raise ImageError(
                f"{source or 'the image'} cannot be encoded as PNG: {_reason(error)}",
                hint="pass a PIL image, such as PIL.Image.fromarray(array)",
            ) from error
        return cls.from_bytes(data, source=source)

    def decode(self, at_least: int | None = None) -> Pillow.Image:
        """Return upright RGB pixels without metadata: the first frame, rotated by its EXIF
        orientation if that is readable, alpha composed over white.

        16-bit values are divided by 257. 32-bit integers count as 8 or 16 bit if all values fit,
        floats as 0 to 1 or 0 to 255; otherwise the finite minimum becomes black and the finite
        maximum white. NaN counts as the minimum.

        `at_least` allows a reduced result (1/2, 1/4 or 1/8) whose sides both keep that many pixels;
        decoding a photograph for a small encoder is then many times faster.
        Raises `ImageError` if the body is damaged. Do not modify the result: it may be shared.
        """
        if self.width * self.height > KEEP_DECODED_UP_TO:
            return self._decode(at_least)
        # `cached_property` of Python 3.11 would make all images wait for one lock.
        decoded: Pillow.Image | None = self.__dict__.get("_decoded")
        if decoded is None:
            decoded = self.__dict__["_decoded"] = self._decode(None)
        return decoded

    def decode_for_model(self, at_least: int | None = None) -> Pillow.Image:
        """Return the pixels of `decode` for a model. Images more than `MAX_RATIO` times as
        long as wide are cropped to their centre.

        Without `at_least`, an image of more than `pixels.LARGE_PIXELS` pixels is reduced to 2048
        pixels on a side, as for endpoints.
        """
        if at_least is None and self.is_large:
            return _centre(self._reduced_for_wire())
        return _centre(self.decode(at_least))

    @property
    def is_large(self) -> bool:
        """Whether the image has more than `pixels.LARGE_PIXELS` pixels."""
        return self.width * self.height > pixels.LARGE_PIXELS

    def is_faint(self) -> bool:
        """Return whether an undamaged image of more than eight bits spans less than 1 % of its
        range."""
        if not pixels.is_deep(_header(self.data, self._name)):
            return False
        try:
            with _damage_errors(self._name):
                return pixels.is_faint(self._loaded(None))
        except ImageError:
            return False

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
        pil_image, transpose = self._loaded_upright(None)
        with _damage_errors(self._name):
            if transpose is not None:
                pil_image = pixels.rgb(pil_image).transpose(transpose)
            for _, strip in pixels.strips(pil_image):
                yield pixels.rgb(strip)

    def detached_copy(self) -> Image:
        """Return an equal image that shares the pixels decoded so far. Pixels that the copy decodes
        later are not kept by this image."""
        other = replace(self)
        shared = self.__dict__.keys() & {"_decoded", "_checked"}
        other.__dict__.update((name, self.__dict__[name]) for name in shared)
        return other

    def check(self) -> None:
        """Raise `ImageError` if the body is damaged. An image that has been decoded once is not
        decoded again."""
        if "_checked" not in self.__dict__:
            self._decode(CHECKED_SIDE)

    def _repr_html_(self) -> str:
        return notebook.render("image", self)

    @property
    def data_url(self) -> str:
        """Return the image as a data URL for a vision endpoint.

        The original bytes are used if every server can read them. Other images (EXIF rotation,
        CMYK, 16 bit, alpha, animation, other formats, more than 2048 pixels on a side) are decoded,
        reduced to 2048 pixels on a side and encoded: as PNG up to 512 x 512 pixels, else as JPEG.
        """
        url: str | None = self.__dict__.get("_data_url")
        if url is None:
            media_type, data = self.media_type, self.data
            if max(self.width, self.height) > WIRE_SIDE or not self._is_sendable():
                media_type, data = pixels.encoded(self._reduced_for_wire())
            url = f"data:{media_type};base64,{pybase64.b64encode_as_string(data)}"
            self.__dict__["_data_url"] = url
        return url

    @property
    def _name(self) -> str:
        return self.source or "the image"

    def _is_sendable(self) -> bool:
        # Decode, because a damaged body must be reported here and not by the server.
        pil_image = self._loaded(CHECKED_SIDE)
        return (
            pil_image.format in WIRE_FORMATS
            and pil_image.mode in WIRE_MODES
            and getattr(pil_image, "n_frames", 1) == 1
            and pixels.upright_transpose(pil_image) is None
            and "transparency" not in pil_image.info
        )

    @property
    def _wire_at_least(self) -> int | None:
        longer, shorter = max(self.width, self.height), min(self.width, self.height)
        return max(1, shorter * WIRE_SIDE // longer) if longer > WIRE_SIDE else None

    def _reduced_for_wire(self) -> Pillow.Image:
        if self._wire_at_least is None:
            return self.decode()
        pil_image = self.decode(self._wire_at_least).copy()
        pil_image.thumbnail((WIRE_SIDE, WIRE_SIDE))
        return pil_image

    def _loaded(self, at_least: int | None) -> Pillow.Image:
        pil_image = _header(self.data, self._name)
        with _damage_errors(self._name):
            if at_least is not None:
                pil_image.draft("RGB", (at_least, at_least))
            pil_image.load()
        return pil_image

    def _loaded_upright(self, at_least: int | None) -> tuple[Pillow.Image, Pillow.Transpose | None]:
        pil_image = self._loaded(at_least)
        with _damage_errors(self._name):
            transpose = pixels.upright_transpose(pil_image)
            is_deep = pixels.is_deep(pil_image)
            return pixels.eight_bits(pil_image) if is_deep else pil_image, transpose

    def _decode(self, at_least: int | None) -> Pillow.Image:
        pil_image, transpose = self._loaded_upright(at_least)
        with _damage_errors(self._name):
            # If the size differs, the JPEG decoder has reduced the image already.
            if at_least is not None and pil_image.size == (self.width, self.height):
                pil_image = pixels.reduced(pil_image, at_least)
            pil_image = pixels.rgb(pil_image)
            pil_image.info.clear()
            self.__dict__["_checked"] = True
            return pil_image if transpose is None else pil_image.transpose(transpose)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields: copies in other processes decode the image themselves."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


def path_text(path: str | Path) -> str:
    """Return a path as valid text. File names are bytes; parts that are not UTF-8 are replaced."""
    return str(path).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def _formats() -> tuple[str, ...]:
    Pillow.init()
    # Pillow has only this process-wide setting. Keep a lower limit set by the host program.
    PngImagePlugin.MAX_TEXT_MEMORY = min(PngImagePlugin.MAX_TEXT_MEMORY, MAX_TEXT)
    return tuple(name for name in FORMATS if name in Pillow.OPEN)


def is_image_file(path: Path | IO[bytes]) -> bool:
    """Return whether a file has the header of a supported format, whatever its suffix."""
    try:
        with Pillow.open(path, formats=_formats()):
            return True
    except Pillow.DecompressionBombError:
        return True
    except Exception:  # same boundary as in `_damage_errors`
        return False


def _header(data: bytes, name: str) -> Pillow.Image:
    try:
        if data.startswith(JPEG_MARKER):  # `Pillow.open` warns of more than 89 megapixels
            return JpegImagePlugin.jpeg_factory(io.BytesIO(data))
        return Pillow.open(io.BytesIO(data), formats=_formats())
    except Pillow.DecompressionBombError as error:
        raise TooManyPixelsError(
            f"{name} has more than {MAX_PIXELS:,} pixels", hint=SMALLER
        ) from error
    except Exception as error:  # same boundary as in `_damage_errors`
        if HEIC.match(data):
            raise ImageError(
                f"{name} is a HEIC image, which is not supported", hint=FROM_HEIC
            ) from error
        raise ImageError(
            f"{name} is not a readable image: {_reason(error)}",
            hint="use JPEG, PNG, WebP, GIF, BMP or TIFF",
        ) from error


@contextmanager
def _damage_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow's decoders raise dozens of types on damaged bytes
        raise ImageError(
            f"{name} is damaged: {_reason(error)}", hint="export the image again"
        ) from error


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "unknown format" if text.startswith("cannot identify") else text


def _centre(pil_image: Pillow.Image) -> Pillow.Image:
    """Return the image, or its centre if it is more than `MAX_RATIO` times as long as wide."""
    width, height = pil_image.size
    longest = MAX_RATIO * min(width, height)
    if max(width, height) <= longest:
        return pil_image
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return pil_image.crop((left, top, width - left, height - top))
