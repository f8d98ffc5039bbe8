from __future__ import annotations

import random
import zipfile
from functools import partial
from pathlib import Path

import pytest

from bottega.errors import BottegaError, ImageError, LoadError
from bottega.evaluation.benchmarks.downloads import Downloads
from tests.builders import solid_image
from tests.evaluation.benchmarks.published import write_archive, write_image, write_json

LAYOUT = "expected is a lot"


def test_archive_is_read_like_an_unpacked_folder(tmp_path: Path) -> None:
    write_archive(tmp_path / "val.zip", {"val/1.jpg": solid_image(1).data})
    write_archive(tmp_path / "task" / "query.zip", {"query/2.jpg": solid_image(2).data})
    write_archive(tmp_path / "rows.json.zip", {"rows.json": b'{"rows": [{"n": 1}]}'})
    write_image(tmp_path / "train" / "3.jpg", 3)
    downloads = Downloads(tmp_path, LAYOUT)
    assert downloads.required("missing", "val") == "val"
    assert downloads.required("train") == "train"
    names = ("val/1.jpg", "task/query/2.jpg", "train/3.jpg")
    assert [downloads.image(name) for name in names] == [solid_image(shade) for shade in (1, 2, 3)]
    assert downloads.rows("rows.json", key="rows") == [(f"{tmp_path}/rows.json, row 0", {"n": 1})]


def test_missing_files_show_the_expected_layout(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no train\.json") as raised:
        Downloads(tmp_path, LAYOUT).rows("train.json", "Annotations/train.json")
    assert raised.value.hint == LAYOUT
    with pytest.raises(LoadError, match="is not a folder"):
        Downloads(tmp_path / "x", LAYOUT).required("train.json")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[{]", "not valid JSON"),
        ('{"rows": []}', "not a list of objects"),
        ("[1]", "not a list of objects"),
    ],
)
def test_file_without_a_row_list_raises(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(LoadError, match=message):
        Downloads(tmp_path, LAYOUT).rows("rows.json")


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'\xef\xbb\xbf[{"n": 1}]')
    assert len(Downloads(tmp_path, LAYOUT).rows("rows.json")) == 1


def test_broken_archive_is_reported(tmp_path: Path) -> None:
    (tmp_path / "val.zip").write_bytes(b"PK and then nothing")
    with pytest.raises(LoadError, match=r"val\.zip cannot be read"):
        Downloads(tmp_path, LAYOUT).find("val")


def test_damaged_member_raises_an_image_error(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "val.zip", {"val/1.jpg": b"\x89PNG" * 50})
    archive.write_bytes(archive.read_bytes().replace(b"\x89PNG\x89PNG", b"\x89PNX\x89PNG", 1))
    with pytest.raises(ImageError, match="cannot be unpacked"):
        Downloads(tmp_path, LAYOUT).image("val/1.jpg")


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "a\0b", "x" * 5000])
def test_rows_cannot_escape_the_folder(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / "secret.png", 1)
    write_json(tmp_path / "data" / "rows.json", [])
    downloads = Downloads(tmp_path / "data", LAYOUT)
    downloads.find(name)
    with pytest.raises(ImageError):
        downloads.image(name)


def test_corrupt_archive_raises_only_own_errors(tmp_path: Path) -> None:
    rng = random.Random(1)
    file = tmp_path / "val.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("val/1.jpg", solid_image(1).data)
        archive.writestr("val.json", '[{"n": 1}]' * 20)
    original, own_errors = file.read_bytes(), 0
    for _ in range(300):
        flipped = bytearray(original)
        flipped[rng.randrange(len(original))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        downloads = Downloads(tmp_path, LAYOUT)
        for read in (partial(downloads.rows, "val.json"), partial(downloads.image, "val/1.jpg")):
            try:
                read()
            except BottegaError:
                own_errors += 1
    assert own_errors > 100
