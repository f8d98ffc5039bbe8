"""Image files: opening, modes, metadata, and encoding for endpoints."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega import pixels
from bottega.errors import ImageError
from bottega.image import MAX_JPEG_PIXELS, MAX_PIXELS, WIRE_SIDE, Image
from tests.image_files import encoded, photo, segment

RED, BLUE = (255, 0, 0), (0, 0, 255)


def wire(image: Image) -> Pillow.Image:
    return Pillow.open(io.BytesIO(base64.b64decode(image.data_url.partition(",")[2])))


def with_chunk(png: bytes, name: bytes, body: bytes) -> bytes:
    """The PNG with one more chunk after its header."""
    chunk = struct.pack(">I", len(body)) + name + body
    return png[:33] + chunk + struct.pack(">I", zlib.crc32(name + body)) + png[33:]


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


def test_pickled_image_leaves_out_its_pixels() -> None:
    image = Image.from_bytes(encoded(photo()), source="a.png")
    before = pickle.dumps(image)
    image.decode()
    assert image.data_url
    after = pickle.dumps(image)
    assert after == before
    copy = pickle.loads(after)
    assert (copy, copy.source, copy.width) == (image, "a.png", 64)
    assert copy.decode().tobytes() == image.decode().tobytes()


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", "DATA:;base64,", ""])
def test_a_data_url_or_bare_base64_is_an_image(prefix: str) -> None:
    data = encoded(photo())
    assert Image.from_data_url(prefix + base64.b64encode(data).decode()).data == data


def test_invalid_base64_is_an_error() -> None:
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
    with pytest.raises(ImageError, match="not a readable image: unknown format"):
        Image.from_bytes(b"no image at all" * 20)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF"])
def test_decoding_detects_a_truncated_body(format: str) -> None:
    data = encoded(photo(300, 300), format)
    image = Image.from_bytes(data[: len(data) // 2], source="half.img")
    with pytest.raises(ImageError, match=r"half\.img is damaged"):
        image.decode()
    with pytest.raises(ImageError, match=r"half\.img is damaged"):
        _ = image.data_url


def test_opening_detects_a_truncated_webp() -> None:
    data = encoded(photo(300, 300), "WEBP")
    with pytest.raises(ImageError, match=r"half\.webp is not a readable image"):
        Image.from_bytes(data[: len(data) // 2], source="half.webp")


def jpeg_header(width: int, height: int) -> bytes:
    data = encoded(photo(8, 8), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def test_a_gigapixel_header_is_rejected_before_decoding() -> None:
    with pytest.raises(ImageError, match="pixels") as raised:
        Image.from_bytes(png_header(40_000, 40_000), source="huge.png")
    assert "reduce" in raised.value.hint


def test_one_pixel_too_many_is_rejected() -> None:
    with pytest.raises(ImageError, match=f"{MAX_PIXELS:,}"):
        Image.from_bytes(png_header(MAX_PIXELS // 1000 + 1, 1000))
    with pytest.raises(ImageError, match=f"{MAX_JPEG_PIXELS:,}"):
        Image.from_bytes(jpeg_header(MAX_JPEG_PIXELS // 10_000 + 1, 10_000))


@pytest.mark.filterwarnings("error")
def test_a_jpeg_of_100_megapixels_opens_without_a_warning() -> None:
    image = Image.from_bytes(jpeg_header(11_656, 8_742))
    assert (image.width, image.height, image.media_type) == (11_656, 8_742, "image/jpeg")


@pytest.mark.parametrize("brand", [b"heic", b"hevc", b"mif1"])
def test_the_error_for_heic_names_a_converter(brand: bytes) -> None:
    data = b"\x00\x00\x00\x18ftyp" + brand + b"\x00\x00\x00\x00mif1heic" + bytes(100)
    with pytest.raises(ImageError, match=r"photo\.jpg is a HEIC image") as raised:
        Image.from_bytes(data, source="photo.jpg")
    assert "pillow-heif" in raised.value.hint


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (2, 999)])
def test_a_model_gets_the_centre_of_a_very_long_image(size: tuple[int, int]) -> None:
    width, height = size
    row = np.arange(max(size), dtype=np.uint8)
    values = np.broadcast_to(row[:, None], (height, width)) if height > width else row[None]
    image = Image.from_pillow(Pillow.fromarray(np.ascontiguousarray(values)))
    for shown in (image.decode_for_model(), image.decode_for_model(1)):
        length = len(row) // 2 - 20 * min(size) // 2
        assert max(shown.size) <= 20 * min(shown.size) + 1
        assert shown.getpixel((0, 0)) == (int(row[length]),) * 3
    assert image.decode().size == size


def test_a_long_image_within_the_ratio_is_whole() -> None:
    assert Image.from_pillow(photo(200, 10)).decode_for_model().size == (200, 10)


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


def deep_png(colour_type: int, clear: tuple[int, ...], other: tuple[int, ...]) -> bytes:
    """Return 8 x 8 pixels of 16 bits, the left half of which is transparent."""
    left, right, key = (struct.pack(f">{len(v)}H", *v) for v in (clear, other, clear))
    rows = (b"\0" + 4 * left + 4 * right) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 16, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    written = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize(
    ("colour_type", "clear", "other", "shown"),
    [
        (0, (12345,), (30000,), (117, 117, 117)),
        (0, (0,), (65535,), (255, 255, 255)),
        (2, (12345, 500, 40000), (30000, 0, 256), (117, 0, 1)),
        (2, (0, 0, 0), (65535, 0, 0), (255, 0, 0)),
    ],
)
def test_transparent_colours_of_16_bits_become_white(
    colour_type: int, clear: tuple[int, ...], other: tuple[int, ...], shown: tuple[int, ...]
) -> None:
    image = Image.from_bytes(deep_png(colour_type, clear, other))
    strips = list(image.rgb_strips())
    for decoded in (image.decode(), image.decode(at_least=4), wire(image), *strips):
        decoded = decoded.convert("RGB").resize((8, 8), Pillow.Resampling.NEAREST)
        assert (decoded.getpixel((0, 0)), decoded.getpixel((7, 7))) == ((255, 255, 255), shown)


@pytest.mark.parametrize(
    ("highest", "dtype", "is_faint"),
    [
        (654, np.uint16, True),
        (656, np.uint16, False),
        (65535, np.uint16, False),
        (1, np.uint8, False),  # eight bits
        (0.009, np.float32, True),
        (0.5, np.float32, False),
        (10**6, np.int32, False),  # scaled to its own range
    ],
)
def test_images_of_many_bits_are_faint_below_a_hundredth_of_the_range(
    highest: float, dtype: type[np.generic], is_faint: bool
) -> None:
    ramp = np.linspace(0, highest, 64).reshape(8, 8).astype(dtype)
    assert Image.from_bytes(encoded(Pillow.fromarray(ramp), "TIFF")).is_faint() == is_faint


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composed_over_white(mode: str) -> None:
    clear = Pillow.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode)
    image = Image.from_bytes(encoded(clear))
    assert image.decode().getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_palette_is_composed_over_white() -> None:
    source = Pillow.new("P", (8, 8), 0)
    source.putpalette([9, 9, 9] * 256)
    image = Image.from_bytes(encoded(source, "GIF", transparency=0))
    assert image.decode().getpixel((0, 0)) == (255, 255, 255)


def test_exif_rotation_is_applied() -> None:
    source = Pillow.new("RGB", (40, 20), BLUE)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees
    image = Image.from_bytes(encoded(source, "JPEG", exif=exif))
    assert image.decode().size == (20, 40)
    assert wire(image).size == (20, 40)


def test_common_formats_are_sent_unchanged() -> None:
    data = encoded(photo(), "JPEG")
    url = Image.from_bytes(data).data_url
    assert url == "data:image/jpeg;base64," + base64.b64encode(data).decode()


def test_a_special_file_is_rejected_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe.png", tmp_path / "link.png", tmp_path):
        with pytest.raises(ImageError, match="not a regular file"):
            Image.open(path)


def test_an_invalid_path_is_named_in_valid_text(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"cannot be read: .*embedded null"):
        Image.open("a\0b.png")
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    path.write_bytes(encoded(photo()))
    assert str(Image.open(path).source).encode().endswith("caf\ufffd.png".encode())


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("F", [0, 1000, 4000], [0, 64, 255]),
        ("F", [-1, 0, 1], [0, 128, 255]),
        ("F", [0, 0.5, 1], [0, 128, 255]),
        ("F", [0, 100, 255], [0, 100, 255]),
        ("F", [0, np.nan, np.inf, 4000], [0, 0, 255, 255]),
        ("F", [4000, 4000], [0, 0]),
        ("I", [0, 500_000, 1_000_000], [0, 128, 255]),
        ("I", [-10, 0, 10], [0, 128, 255]),
        ("I", [0, 100, 255], [0, 100, 255]),
        ("I", [0, 257, 65535], [0, 1, 255]),
    ],
)
def test_values_beyond_eight_bits_are_scaled(
    mode: str, values: list[float], expected: list[int]
) -> None:
    pixels = np.array([values], np.float32 if mode == "F" else np.int32)
    image = Image.from_bytes(encoded(Pillow.fromarray(pixels), "TIFF"))
    assert np.asarray(image.decode())[0, :, 0].tolist() == expected


def test_an_image_without_a_finite_value_is_an_error() -> None:
    pixels = np.full((4, 4), np.nan, np.float32)
    with pytest.raises(ImageError, match="all pixels are NaN or infinite"):
        Image.from_bytes(encoded(Pillow.fromarray(pixels), "TIFF")).decode()


def test_broken_metadata_does_not_reject_intact_pixels() -> None:
    plain = encoded(photo())
    for body in (b"garbage", b"II*\0" + b"\xff" * 40, b"MM\0*\0\0\0\x08\xff\xff"):
        image = Image.from_bytes(with_chunk(plain, b"eXIf", body))
        assert np.array_equal(np.asarray(image.decode()), np.asarray(photo()))
        assert image.data_url


def test_more_than_a_megabyte_of_compressed_text_is_rejected() -> None:
    plain, text = encoded(photo()), b"note\0\0" + zlib.compress(bytes(700_000))
    once = with_chunk(plain, b"zTXt", text)
    assert Image.from_bytes(once).width == 64
    with pytest.raises(ImageError, match=r"bomb\.png .*text"):
        Image.from_bytes(with_chunk(once, b"zTXt", text), source="bomb.png")


@pytest.mark.parametrize(
    "filler", [b"\xff" * 100_000, b"\0" * 100_000, b"\xff\0" * 50_000, b"\xff\xfe\0\2" * 25_000]
)
def test_a_jpeg_with_much_filler_between_its_segments_is_rejected(filler: bytes) -> None:
    data = encoded(photo(), "JPEG")
    few = filler[:1000]
    assert Image.from_bytes(data[:2] + segment(0xFE, b"\xff" * 60_000) + few + data[2:]).decode()
    with pytest.raises(ImageError, match=r"filler\.jpg .*header"):
        Image.from_bytes(data[:2] + segment(0xFE, b"") + filler + data[2:], source="filler.jpg")
    with pytest.raises(ImageError, match="header"):
        Image.from_bytes(b"\xff\xd8\xff\xfe\0\2" + filler)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_wrong_type_inside_exif_leaves_the_rotation(format: str) -> None:
    # Artist, which is a text, as a rational number with zero below.
    entries = struct.pack("<HHII", 0x0112, 3, 1, 6) + struct.pack("<HHII", 0x013B, 5, 1, 38)
    exif = b"II*\0\x08\0\0\0\x02\0" + entries + b"\0" * 4 + struct.pack("<II", 1, 0)
    image = Image.from_bytes(encoded(photo(40, 20), format, exif=b"Exif\0\0" + exif))
    assert image.decode().size == (20, 40)
    assert wire(image).size == (20, 40)


@pytest.mark.parametrize("format", ["EPS", "PDF", "ICO", "PCX"])
def test_formats_beyond_photographs_are_not_read(format: str) -> None:
    with pytest.raises(ImageError, match="unknown format"):
        Image.from_bytes(encoded(photo(32, 32), format), source="evil.jpg")


@pytest.mark.parametrize("format", ["JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_formats_of_photographs_are_read(format: str) -> None:
    image = Image.from_bytes(encoded(photo(32, 32), format))
    assert image.decode().size == (32, 32)
    assert image.media_type.startswith("image/")


def test_a_plain_jpeg_is_checked_without_its_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.from_bytes(encoded(photo(1600, 1200), "JPEG"))
    monkeypatch.setattr(Image, "decode", None)
    assert base64.b64decode(image.data_url.partition(",")[2]) == image.data


def test_large_images_are_reduced_before_sending() -> None:
    for size, sent in (((4096, 1024), (2048, 512)), ((1, 5000), (1, 2048)), ((2048, 9), (2048, 9))):
        image = Image.from_bytes(encoded(Pillow.new("RGB", size)))
        assert wire(image).size == sent
        assert max(sent) <= WIRE_SIDE


@pytest.mark.parametrize(("side", "format"), [(512, "PNG"), (513, "JPEG")])
def test_small_reencoded_images_are_png(side: int, format: str) -> None:
    image = Image.from_bytes(encoded(photo(side, side).convert("RGBA")))
    assert wire(image).format == format
    assert image.data_url.startswith(f"data:image/{format.lower()};base64,")


def test_a_detached_copy_shares_existing_pixels_only() -> None:
    image = Image.from_pillow(photo())
    assert "_decoded" not in vars(image.detached_copy())
    image.detached_copy().decode()
    assert "_decoded" not in vars(image)
    assert image.decode() is image.detached_copy().decode()
    assert image.detached_copy() == image


def test_a_small_image_does_not_wait_for_the_encoding_of_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = (Image.from_pillow(photo(side, side).convert("RGBA")) for side in (600, 6))
    started, finish = threading.Event(), threading.Event()
    encode = pixels.encoded

    def encoded_slowly(source: Pillow.Image) -> tuple[str, bytes]:
        if source.width == large.width:
            started.set()
            assert finish.wait(30)
        return encode(source)

    monkeypatch.setattr(pixels, "encoded", encoded_slowly)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(lambda: large.data_url)
        assert started.wait(30)
        try:
            assert pool.submit(lambda: small.data_url).result(5)
            assert not slow.done()
        finally:
            finish.set()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "F", "PA", "La", "RGBa", "RGBX"])
def test_a_pil_image_of_any_mode_is_encoded(mode: str) -> None:
    assert Image.from_pillow(Pillow.new(mode, (5, 3))).decode().size == (5, 3)


def test_a_pil_image_is_encoded_upright() -> None:
    exif = Pillow.Exif()
    exif[0x112] = 6
    photograph = Pillow.new("RGB", (8, 4), BLUE)
    photograph.paste(RED, (0, 0, 4, 4))
    opened = Pillow.open(io.BytesIO(encoded(photograph, "PNG", exif=exif)))
    upright = Image.from_pillow(opened).decode()
    assert upright.size == (4, 8)
    assert (upright.getpixel((2, 1)), upright.getpixel((2, 6))) == (RED, BLUE)


@pytest.mark.parametrize("given", [Pillow.new("RGB", (0, 3)), np.zeros((3, 3, 3), np.uint8)])
def test_an_array_or_an_image_without_pixels_is_an_error(given: Pillow.Image) -> None:
    with pytest.raises(ImageError, match="cannot be encoded as PNG") as raised:
        Image.from_pillow(given)
    assert "PIL.Image.fromarray" in raised.value.hint
