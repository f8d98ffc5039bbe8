from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega.errors import ImageError
from bottega.image import MAX_PIXELS, Image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(picture: Pillow.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int = 64, height: int = 48) -> Pillow.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def wire(image: Image) -> Pillow.Image:
    return Pillow.open(io.BytesIO(base64.b64decode(image.data_url.partition(",")[2])))


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checked = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + checked + struct.pack(">I", 9) + b"IDAT"


def test_equal_bytes_are_equal_images(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(photo()))
    opened, again = Image.open(path), Image.from_bytes(path.read_bytes())
    assert opened == again
    assert {opened} == {again}
    assert (opened.width, opened.height, opened.media_type) == (64, 48, "image/png")
    assert opened.source == str(path)


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", ""])
def test_a_data_url_or_bare_base64_is_an_image(prefix: str) -> None:
    data = encoded(photo())
    assert Image.from_data_url(prefix + base64.b64encode(data).decode()).data == data


def test_what_is_not_base64_is_an_error() -> None:
    with pytest.raises(ImageError, match="row 3 is not valid base64"):
        Image.from_data_url("data:image/png;base64,%%%", source="row 3")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"gone\.png cannot be read") as raised:
        Image.open(tmp_path / "gone.png")
    assert raised.value.hint


def test_a_file_of_zero_bytes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ImageError, match=r"empty\.jpg is empty"):
        Image.open(tmp_path / "empty.jpg")


def test_a_corrupt_header_is_an_error() -> None:
    with pytest.raises(ImageError, match="not an image that can be read: unknown format"):
        Image.from_bytes(b"no image at all" * 20)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF"])
def test_a_truncated_body_shows_when_it_is_decoded(format: str) -> None:
    data = encoded(photo(300, 300), format)
    image = Image.from_bytes(data[: len(data) // 2], source="half.img")
    with pytest.raises(ImageError, match=r"half\.img is damaged"):
        image.decode()
    with pytest.raises(ImageError, match=r"half\.img is damaged"):
        _ = image.data_url


def test_a_truncated_webp_shows_at_once() -> None:
    data = encoded(photo(300, 300), "WEBP")
    with pytest.raises(ImageError, match=r"half\.webp is not an image that can be read"):
        Image.from_bytes(data[: len(data) // 2], source="half.webp")


def test_a_gigapixel_header_is_refused_before_anything_is_decoded() -> None:
    with pytest.raises(ImageError, match="pixels") as raised:
        Image.from_bytes(png_header(40_000, 40_000), source="huge.png")
    assert "reduce" in raised.value.hint


def test_one_pixel_too_many_is_refused() -> None:
    with pytest.raises(ImageError, match=f"{MAX_PIXELS:,}"):
        Image.from_bytes(png_header(MAX_PIXELS // 1000 + 1, 1000))


def test_an_animation_is_its_first_frame() -> None:
    frames = [Pillow.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    image = Image.from_bytes(data)
    assert image.decode().getpixel((4, 4)) == RED
    assert wire(image).format == "PNG"


def test_cmyk_becomes_rgb() -> None:
    image = Image.from_bytes(encoded(Pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    decoded = image.decode()
    assert decoded.mode == "RGB"
    red, green, blue = np.asarray(decoded)[4, 4]
    assert red > 200 > green + 100
    assert red > 200 > blue + 100
    assert wire(image).mode == "RGB"


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    image = Image.from_bytes(encoded(Pillow.fromarray(ramp)))
    grey = np.asarray(image.decode().convert("L")).ravel()
    assert grey[0] == 0
    assert grey[-1] == 255
    assert (np.diff(grey.astype(int)) >= 0).all()
    assert abs(int(grey[32]) - 129) <= 2


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_laid_over_white(mode: str) -> None:
    clear = Pillow.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode)
    image = Image.from_bytes(encoded(clear))
    assert image.decode().getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_palette_is_laid_over_white() -> None:
    picture = Pillow.new("P", (8, 8), 0)
    picture.putpalette([9, 9, 9] * 256)
    image = Image.from_bytes(encoded(picture, "GIF", transparency=0))
    assert image.decode().getpixel((0, 0)) == (255, 255, 255)


def test_exif_rotation_is_applied() -> None:
    picture = Pillow.new("RGB", (40, 20), BLUE)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees
    image = Image.from_bytes(encoded(picture, "JPEG", exif=exif))
    assert image.decode().size == (20, 40)
    assert wire(image).size == (20, 40)


def test_a_large_jpeg_is_decoded_reduced_but_not_below_the_limit() -> None:
    image = Image.from_bytes(encoded(Pillow.new("RGB", (1600, 1200), RED), "JPEG"))
    small = image.decode(at_least=200)
    assert min(small.size) >= 200
    assert small.width < 1600
    assert image.decode().size == (1600, 1200)


def test_what_every_server_reads_travels_as_it_is() -> None:
    data = encoded(photo(), "JPEG")
    url = Image.from_bytes(data).data_url
    assert url == "data:image/jpeg;base64," + base64.b64encode(data).decode()
