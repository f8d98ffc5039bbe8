"""Zip archives, added by `bottega add`."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bottega.image import MAX_BYTES
from bottega.knowledge.loaders import archives
from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.cli.table_files import FILES, IMAGES, LABELS, added_labels, write_zip


@pytest.mark.parametrize("prefix", ["", "pets/", "export/pets/", "pets\\"])
def test_a_zip_of_class_folders_is_read(run: Run, tmp_path: Path, prefix: str) -> None:
    files = {
        f"{prefix}{name.replace('/', prefix[-1:] or '/')}": solid_image(shade).data
        for shade, name in enumerate(FILES)
    }
    system = {"__MACOSX/cat/._1.png": b"x", f"{prefix}readme.txt": b"hello"}
    write_zip(tmp_path / "my.zip", files | system)
    assert added_labels(run, "my.zip") == LABELS
    added = run("add", "k.db", "my.zip")
    assert "not read: 1 .txt, 1 hidden or system" in added.err
    listed: Any = run("ls", "k.db", "--json").json
    assert any(one["source"].endswith("/cat/1.png") for one in listed)


def test_names_in_a_zip_are_utf_8_also_without_the_flag(run: Run, tmp_path: Path) -> None:
    with zipfile.ZipFile("my.zip", "w") as archive:
        for shade, label in enumerate(("café", "dog")):
            archive.writestr(f"{label}/1.png", solid_image(shade).data)
    packed = Path("my.zip").read_bytes()
    for entry in zipfile.ZipFile("my.zip").infolist():
        assert bool(entry.flag_bits & 0x800) == ("é" in entry.filename)
    # As programs write it that leave out the flag, in both headers of the entry.
    name = "café/1.png".encode()
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = packed.index(header) + flags
        packed = packed[:start] + b"\0\0" + packed[start + 2 :]
    assert packed.count(name) == 2
    Path("my.zip").write_bytes(packed)
    assert added_labels(run, "my.zip") == {"café": 1, "dog": 1}


def test_a_zip_of_splits_needs_one(run: Run, tmp_path: Path) -> None:
    files = {
        f"tv/{split}/{name}": solid_image(shade).data
        for split in ("train", "valid")
        for shade, name in enumerate(FILES)
    }
    write_zip(tmp_path / "tv.zip", files)
    refused = run("add", "k.db", "tv.zip")
    assert (refused.code, "contains the splits train and valid" in refused.err) == (1, True)
    assert added_labels(run, "tv.zip", "--split", "val") == LABELS


def test_a_folder_in_a_zip_is_a_source(run: Run, tmp_path: Path) -> None:
    files = {f"data/{split}/{n}": d for split in ("train", "val") for n, d in IMAGES.items()}
    write_zip(tmp_path / "s1.zip", files)
    for folder in ("s1.zip/data/train", "s1.zip/data/val/"):
        Path("k.db").unlink(missing_ok=True)
        assert added_labels(run, folder) == LABELS
    assert added_labels(run, "s1.zip/data", "--split", "val") == LABELS
    planned = run("eval", "image-folder:s1.zip/data/train", "--methods", "nearest", "--dry-run")
    assert planned.code == 0, planned.err
    for missing in ("s1.zip/data/test", "other.zip", "other.zip/data"):
        assert run("add", "other.db", missing).code == 1


PNG = IMAGES[FILES[0]]
# Entries, and the words that name the problem.
ENTRIES: dict[str, tuple[list[tuple[str, bytes]], list[str], int]] = {
    "all outside": (
        [("../a.png", PNG), ("/b.png", PNG)],
        ["'../a.png' leads outside", "'/b.png' leads"],
        1,
    ),
    "outside, damaged": (
        [("../a.png", PNG), ("cat/1.png", b"x")],
        ["'../a.png' leads", "1.png"],
        1,
    ),
    "nested": ([("cat/1.png", PNG), ("dog.ZIP", b"PK")], ["'dog.ZIP' is an archive itself"], 0),
    "nested alone": ([("x/dog.zip", b"PK")], ["'x/dog.zip' is an archive itself"], 1),
    "twice": (
        [("cat/1.png", PNG), ("cat/1.png", IMAGES[FILES[1]])],
        ["'cat/1.png' occurs twice"],
        0,
    ),
    "twice on Windows": (
        [("cat/1.png", PNG), ("cat\\1.png", IMAGES[FILES[1]])],
        ["'cat\\\\1.png' occurs twice"],
        0,
    ),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_unusual_entries_of_a_zip_are_named(run: Run, tmp_path: Path, case: str) -> None:
    entries, problems, code = ENTRIES[case]
    with zipfile.ZipFile("my.zip", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of equal names
        for name, data in entries:
            archive.writestr(name, data)
    added = run("add", "k.db", "my.zip", "--embed", "pixels")
    assert added.code == code, added.err
    assert all(problem in added.err for problem in problems), added.err


OUTSIDE = ("../out.png", "/etc/out.png", "C:\\pets\\out.png", "cat\\..\\..\\out.png")


def test_bad_entries_of_a_zip_do_not_stop_the_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: solid_image(shade).data for shade, name in enumerate(FILES)}
    bomb = {"cat/bomb.png": bytes(MAX_BYTES + 1), "dog/half.png": solid_image(4).data[:40]}
    write_zip(tmp_path / "my.zip", files | dict.fromkeys(OUTSIDE, b"x") | bomb)
    added: Any = run("add", "k.db", "my.zip", "--embed", "pixels", "--json")
    assert (added.code, added.json["new"], len(added.json["skipped"])) == (0, 3, 6)
    reasons = " ".join(one["reason"] for one in added.json["skipped"])
    for name in OUTSIDE:
        assert f"the entry {name!r} leads outside of the archive" in reasons
    assert "bomb.png is larger than 128 MB" in added.err
    assert not (tmp_path.parent / "out.png").exists()
    monkeypatch.setattr(archives, "MAX_ENTRIES", 3)
    refused = run("add", "other.db", "my.zip")
    assert (refused.code, "has 9 entries, more than 3" in refused.err) == (1, True)
    (tmp_path / "bad.zip").write_bytes((tmp_path / "my.zip").read_bytes()[:-30])
    refused = run("add", "other.db", "bad.zip")
    assert (refused.code, "bad.zip is not a readable zip archive" in refused.err) == (1, True)
