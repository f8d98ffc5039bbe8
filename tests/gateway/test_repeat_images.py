"""Image digests in the cache keys of repeated requests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega.gateway.state.response_cache import image_digest
from bottega.image import Image


def encoded(bitmap: Pillow.Image, format: str = "PNG", **options: Any) -> Image:
    file = io.BytesIO()
    bitmap.save(file, format, **options)
    return Image.from_bytes(file.getvalue())


@pytest.fixture
def noise() -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(0).integers(0, 255, (24, 16, 3), np.uint8))


def test_reencoded_pixels_are_equal_if_configured(noise: Pillow.Image) -> None:
    images = [
        encoded(noise, compress_level=0),
        encoded(noise, compress_level=9),
        encoded(noise, "BMP"),
        encoded(noise, "WEBP", lossless=True),
    ]
    assert len({image_digest(image, "bytes") for image in images}) == 4
    assert len({image_digest(image, "pixels") for image in images}) == 1
    changed = noise.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    others = [encoded(changed), encoded(noise.transpose(Pillow.Transpose.TRANSPOSE))]
    assert len({image_digest(image, "pixels") for image in [*others, images[0]]}) == 3


def test_shape_of_equal_pixels_counts() -> None:
    digests = {image_digest(encoded(Pillow.new("L", size)), "pixels") for size in [(2, 8), (4, 4)]}
    assert len(digests) == 2


def layered(alpha: int) -> Image:
    return encoded(Pillow.new("RGBA", (4, 4), (255, 255, 255, alpha)))


def white(**options: Any) -> Image:
    return encoded(Pillow.new("L", (4, 4), 255).convert("P"), **options)


def animated(last: str) -> Image:
    frames = [Pillow.new("RGB", (4, 4), colour) for colour in ("red", last)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def deep(value: int) -> Image:
    return encoded(Pillow.fromarray(np.full((4, 4), value, np.uint16)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (layered(255), layered(3)),
        (white(), white(transparency=255)),
        (animated("blue"), animated("green")),
        (deep(257), deep(258)),
        (
            encoded(Pillow.new("CMYK", (4, 4), (0, 0, 0, 255)), "TIFF"),
            encoded(Pillow.new("CMYK", (4, 4), (9, 0, 0, 255)), "TIFF"),
        ),
    ],
)
def test_data_lost_in_decoding_counts(one: Image, other: Image) -> None:
    assert image_digest(one, "pixels") != image_digest(other, "pixels")


def test_rotation_counts(noise: Pillow.Image) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    turned = noise.transpose(Pillow.Transpose.ROTATE_270)
    by_exif = encoded(noise, exif=exif)
    assert by_exif.decode().tobytes() == encoded(turned).decode().tobytes()
    assert image_digest(by_exif, "pixels") != image_digest(encoded(turned), "pixels")
