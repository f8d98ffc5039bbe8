"""Decoded pixels: memory, its estimate, and reduction."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image as Pillow

from bottega import pixels
from bottega.image import Image
from tests.image_files import encoded, photo, segment

PROCESS = Path("/proc/self/status")


def test_a_large_jpeg_is_decoded_reduced_but_not_below_the_limit() -> None:
    image = Image.from_bytes(encoded(Pillow.new("RGB", (1600, 1200), "red"), "JPEG"))
    small = image.decode(at_least=200)
    assert min(small.size) >= 200
    assert small.width < 1600
    assert image.decode().size == (1600, 1200)


DECODING = """
import sys
from bottega.image import Image
image = Image.open(sys.argv[1])
match sys.argv[2]:
    case "whole":
        image.decode()
    case "reduced":
        image.decode(at_least=64)
    case "strips":
        list(map(len, (strip.tobytes() for strip in image.rgb_strips())))
    case "model":
        image.decode_for_model()
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


# Not from getrusage: its peak is inherited from the process that runs the tests.
@pytest.mark.skipif(not PROCESS.exists(), reason="requires /proc to read the peak")
@pytest.mark.parametrize(
    ("mode", "how", "side", "megabytes"),
    # The process alone holds 70; all pixels as float64 would be 160 more at 4450 on a side.
    [
        pytest.param("I;16", "whole", 4450, 240, marks=pytest.mark.slow),
        pytest.param("I;16", "reduced", 8900, 400, marks=pytest.mark.slow),
        pytest.param("RGBA", "whole", 4450, 300, marks=pytest.mark.slow),
        ("1", "reduced", 6320, 160),
        pytest.param("1", "strips", 6320, 160, marks=pytest.mark.slow),
        pytest.param("1", "model", 6320, 190, marks=pytest.mark.slow),
    ],
)
def test_an_image_of_many_pixels_takes_little_memory(
    tmp_path: Path, mode: str, how: str, side: int, megabytes: int
) -> None:
    path = tmp_path / "wide.png"
    Pillow.new(mode, (side, side)).save(path, compress_level=1)
    command = [sys.executable, "-c", DECODING, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < megabytes


@pytest.mark.skipif(not PROCESS.exists(), reason="requires /proc to read the peak")
@pytest.mark.slow
def test_a_jpeg_of_100_megapixels_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    Pillow.new("L", (12_000, 9_000)).save(path)
    for how, megabytes in (("reduced", 110), ("model", 170)):
        command = [sys.executable, "-W", "error", "-c", DECODING, str(path), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) / 1024 < megabytes


COSTING = """
import sys
from pathlib import Path
from bottega.image import Image

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

for path in sys.argv[1:]:
    image = Image.open(path)
    for at_least in (None, 64):
        cost = image.decode_cost(at_least)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
        before = peak()
        image.decode(at_least)
        print(path, at_least, cost.peak, peak() - before)
"""
OPTIONS: dict[str, dict[str, object]] = {
    "WEBP": {"lossless": True},
    "AVIF": {"speed": 10},
    "PNG": {"compress_level": 1},
}


def costs(*paths: str) -> list[tuple[str, str, int, int]]:
    """Return the path, `at_least`, the estimated and the measured peak of each decoding."""
    done = subprocess.run(
        [sys.executable, "-c", COSTING, *paths], capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in done.stdout.splitlines())
    return [(path, least, int(cost), int(peak)) for path, least, cost, peak in rows]


KINDS = [
    "PNG/1",
    "PNG/P",
    "PNG/RGB",
    "PNG/RGBA",
    "PNG/I;16",
    "GIF/P",
    "BMP/RGB",
    "TIFF/RGB",
    "TIFF/F",
    "JPEG/RGB",
    "JPEG/RGB/progressive",
    "JPEG/L",
    "WEBP/RGB",
    "AVIF/RGB",
    "JPEG2000/RGB",
]


@pytest.mark.skipif(not PROCESS.exists(), reason="requires /proc to read the peak")
def test_the_estimated_cost_covers_the_measured_peak(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind.split("/")[0] in Pillow.SAVE]
    paths = [tmp_path / kind.replace("/", "-") for kind in kinds]
    for kind, path in zip(kinds, paths, strict=True):
        format, mode, *options = kind.split("/")
        chosen = {**dict.fromkeys(options, True), **OPTIONS.get(format, {})}
        path.write_bytes(encoded(Pillow.new(mode, (1200, 1200)), format, **chosen))
    rows = costs(*map(str, paths))
    assert len(rows) == 2 * len(kinds)
    for name, at_least, estimated, measured in rows:
        assert measured < estimated * 1.1 + 4_000_000, (name, at_least)


def test_a_large_palette_image_is_reduced_as_rgb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the strips nor the reduction divide the rows evenly."""
    monkeypatch.setattr(pixels, "LARGE_PIXELS", 250_000)
    monkeypatch.setattr(pixels, "STRIP_PIXELS", 10_000)
    source = photo(607, 413).convert("P")
    image = Image.from_bytes(encoded(source))
    expected = source.convert("RGB").reduce(8)
    assert image.decode(at_least=48).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["1", "P"])
def test_ordinary_images_are_decoded_without_reduction(mode: str) -> None:
    """Stored vectors depend on these pixels."""
    source = photo(900, 600).convert(mode)
    image = Image.from_bytes(encoded(source))
    expected = source.convert("RGB").tobytes()
    assert image.decode(at_least=64).tobytes() == expected
    assert image.decode_for_model().tobytes() == expected
    assert b"".join(strip.tobytes() for strip in image.rgb_strips()) == expected


def test_strips_are_the_upright_pixels() -> None:
    source = photo(64, 48)
    turned = source.getexif()
    turned[0x0112] = 6
    image = Image.from_bytes(encoded(source, exif=turned.tobytes()))
    strips = b"".join(strip.tobytes() for strip in image.rgb_strips())
    assert strips == image.decode().tobytes()
    assert image.decode().size == (48, 64)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "I;16"])
def test_large_images_of_every_mode_can_be_reduced(mode: str) -> None:
    image = Image.from_bytes(encoded(Pillow.new(mode, (900, 600))))
    assert image.decode(at_least=128).size == (225, 150)
    assert image.decode(at_least=128).mode == "RGB"
    assert image.decode().size == (900, 600)


def test_only_small_images_keep_their_pixels() -> None:
    small, large = (Image.from_bytes(encoded(photo(side, side))) for side in (64, 65))
    assert small.decode() is small.decode()
    assert large.decode() is not large.decode()


def sequential_jpeg(side: int, scans: tuple[tuple[int, ...], ...]) -> bytes:
    """Return a baseline JPEG of three components with these scans, which hold no data."""
    shape = struct.pack(">BHHB", 8, side, side, 3)
    data = b"\xff\xd8" + segment(0xC0, shape + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0]))
    for scan in scans:
        parts = b"".join(bytes([component, 0]) for component in scan)
        data += segment(0xDA, bytes([len(scan)]) + parts + bytes([0, 63, 0])) + bytes(8)
    return data + b"\xff\xd9"


def deep_tiff(side: int, photometric: int, extra: tuple[int, ...] = ()) -> bytes:
    """Return a TIFF of four 16-bit channels, deflated as a single strip."""
    strip = zlib.compress(bytes(8 * side * side), 1)
    tags = {256: side, 257: side, 259: 8, 262: photometric, 277: 4, 278: side, 279: len(strip)}
    entries = {tag: struct.pack("<HII", 4, 1, value) for tag, value in tags.items()}
    end = 8 + 2 + 12 * (len(tags) + 2 + len(extra)) + 4
    entries[258] = struct.pack("<HII", 3, 4, end)
    entries[273] = struct.pack("<HII", 4, 1, end + 8)
    if extra:
        entries[338] = struct.pack("<HIHH", 3, 1, extra[0], 0)
    fields = b"".join(struct.pack("<H", tag) + entries[tag] for tag in sorted(entries))
    directory = struct.pack("<H", len(entries)) + fields + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<4H", *[16] * 4) + strip


@pytest.mark.skipif(not PROCESS.exists(), reason="requires /proc to read the peak")
@pytest.mark.slow
def test_the_cost_of_a_deep_tiff_in_one_strip_covers_its_peak(tmp_path: Path) -> None:
    files = {"cmyk": deep_tiff(2400, 5), "rgbx": deep_tiff(2400, 2, (0,))}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in files]
    for name, at_least, estimated, measured in costs(*paths):
        assert measured < estimated * 1.1 + 4_000_000, (name, at_least)


def test_a_sequential_jpeg_of_several_scans_costs_its_coefficients() -> None:
    side, pixel_count = 6320, 6320**2
    separate = Image.from_bytes(sequential_jpeg(side, ((1,), (2,), (3,))))
    interleaved = Image.from_bytes(sequential_jpeg(side, ((1, 2, 3),)))
    assert separate.decode_cost(512).peak >= 6 * pixel_count
    assert interleaved.decode_cost(512).peak < pixel_count


def test_an_mpo_file_of_several_scans_costs_its_coefficients() -> None:
    frames = {"save_all": True, "append_images": [photo(800, 800)]}
    sequential = Image.from_bytes(encoded(photo(800, 800), "MPO", **frames))
    progressive = Image.from_bytes(encoded(photo(800, 800), "MPO", progressive=True, **frames))
    assert sequential.media_type == progressive.media_type == "image/mpo"
    assert sequential.decode_cost(64).peak < 800**2
    assert progressive.decode_cost(64).peak >= 6 * 800**2
