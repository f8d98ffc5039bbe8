"""Tables that lie beside the images that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.cli.table_files import FILES, IMAGES, LABELS, added_labels, write_files, write_zip


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_hugging_face_image_folders_are_read(run: Run, images: Path, name: str) -> None:
    for split in ("train", "validation"):
        folder = images / "set" / split
        folder.mkdir(parents=True)
        for file in FILES:
            (folder / file.replace("/", "-")).write_bytes((images / file).read_bytes())
        pairs = [(file.replace("/", "-"), file[:3]) for file in FILES]
        lines = [json.dumps({"file_name": file, "label": label}) for file, label in pairs]
        if name == "metadata.csv":
            lines = ["file_name,label", *(f"{file},{label}" for file, label in pairs)]
        (folder / name).write_text("\n".join(lines))
    refused = run("add", "k.db", "set")
    assert (refused.code, "contains the splits train and validation" in refused.err) == (1, True)
    assert added_labels(run, "set", "--split", "val") == LABELS
    assert added_labels(run, "set/train") == LABELS


@pytest.mark.parametrize("name", ["my.csv", "my.jsonl", "metadata.csv", ""])
def test_a_split_of_a_single_table_is_refused(run: Run, images: Path, name: str) -> None:
    text = '{"image": "cat/1.png", "label": "cat"}' if "json" in name else "file_name,label\nx,a\n"
    (images / (name or "metadata.csv")).write_text(text)
    refused = run("add", "k.db", name or ".", "--split", "test", "--embed", "pixels")
    named = name or "metadata.csv"
    assert (refused.code, f"{named} has no splits" in refused.err) == (2, True)
    assert "omit --split" in refused.err


FLAT = {f"train/{name.replace('/', '-')}": data for name, data in IMAGES.items()}
IDS = "".join(f"{Path(name).stem},{Path(name).name[:3]}\n" for name in FLAT)
NAMES = "".join(f"{Path(name).name},{Path(name).name[:3]}\n" for name in FLAT)
ONE_HOT = "name,cat,dog\n" + "".join(
    f"{Path(n).name},{1 - i // 2},{i // 2}\n" for i, n in enumerate(FLAT)
)
BOXES = {f"labels/{Path(name).stem}.txt": b"0 .5 .5 1 1" for name in FLAT}
DETECTION = {name.replace("train", "images"): data for name, data in FLAT.items()} | BOXES
# Files, and the words of the refusal; None if the folders are the classes.
BESIDE: dict[str, tuple[dict[str, bytes], str | None]] = {
    "ids": (FLAT | {"labels.csv": b"id,breed\n" + IDS.encode()}, "labels.csv names the images"),
    "names": (FLAT | {"train.csv": b"file,label\n" + NAMES.encode()}, "train.csv names the images"),
    "tabs": (
        FLAT | {"t.TSV": b"n\tfile\tlabel\n" + NAMES.replace(",", "\t").encode()},
        "t.TSV names the images",
    ),
    "numbers": (
        {"train/1.png": IMAGES[FILES[0]], "labels.csv": b"id,label\n1,cat\n"},
        "labels.csv names the images",
    ),
    "spaces": (IMAGES | {"my.csv": b" " * (1 << 16)}, None),
    "lines": (
        IMAGES | {"my.jsonl": b'{"image": "cat/1.png", "label": "x"}'},
        "my.jsonl names the images",
    ),
    "paths": (
        IMAGES | {"my.csv": b'path,label\n".\\cat\\1.png",x'},
        "my.csv names the images",
    ),
    "other metadata": (
        IMAGES | {"metadata.csv": b"file,label\ncat/1.png,x"},
        "metadata.csv names the images",
    ),
    "in the class folder": (IMAGES | {"cat/notes.csv": b"file,label\n1.png,x"}, None),
    "stray metadata": (IMAGES | {"metadata.csv": b"key,value\nauthor,me\n"}, None),
    "stray metadata lines": (IMAGES | {"metadata.jsonl": b'{"author": "me"}'}, None),
    "stray demo": (IMAGES | {"demo.csv": b"key,value\nauthor,me\n"}, None),
    "stray counts": (IMAGES | {"classes.csv": b"class,count\ncat,2\n1,2\n"}, None),
    "damaged": (IMAGES | {"my.csv": b"\xff\xfe\0\0"}, None),
    "boxes": (DETECTION, "has the folders images and labels, with 3 .txt files"),
    "boxes in capitals": (
        {
            name.title().replace("Png", "png").replace("Txt", "txt"): d
            for name, d in DETECTION.items()
        },
        "has the folders images and labels, with 3 .txt files",
    ),
    "texts in class folders": (
        IMAGES | {"cat/1.txt": b"a cat", "labels/1.png": solid_image(7).data},
        None,
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", BESIDE)
def test_folders_beside_a_table_of_their_images_are_not_classes(
    run: Run, tmp_path: Path, case: str, packed: bool
) -> None:
    files, refusal = BESIDE[case]
    source = tmp_path / ("set.zip" if packed else "set")
    write_zip(source, files) if packed else write_files(source, files)
    added = run("add", "k.db", source, "--embed", "pixels")
    if refusal is None:
        assert added.code == 0, added.err
        added_classes: Any = run("ls", "k.db", "--json").json
        assert {one["answer"] for one in added_classes} >= {"cat", "dog"}
    else:
        assert (added.code, refusal in added.err) == (1, True), added.err
        assert not Path("k.db").exists()
        refused = run("eval", f"image-folder:{source}", "--methods", "nearest")
        assert (refused.code, refusal in refused.err) == (1, True), refused.err


@pytest.mark.parametrize(
    ("files", "table", "options"),
    [
        (BESIDE["ids"][0], "labels.csv", ("--image-column", "id", "--label-column", "breed")),
        (BESIDE["names"][0], "train.csv", ()),
        (FLAT | {"metadata.csv": b"file_name,label\n" + NAMES.encode()}, "", ()),
        (
            {n.replace("train", "images"): d for n, d in FLAT.items()}
            | {"demo.csv": ONE_HOT.encode()},
            "",
            (),
        ),
    ],
)
def test_a_table_reads_the_images_beside_it(
    run: Run, tmp_path: Path, files: dict[str, bytes], table: str, options: tuple[str, ...]
) -> None:
    write_files(tmp_path / "set", files)
    assert added_labels(run, f"set/{table}", *options) == LABELS


def test_an_id_of_several_images_is_refused(run: Run, tmp_path: Path) -> None:
    files = {"a/1.png": IMAGES[FILES[0]], "b/1.png": IMAGES[FILES[1]], "b/2.png": IMAGES[FILES[2]]}
    write_files(tmp_path / "set", files | {"my.csv": b"image,label\n1.png,cat\n2,dog\n"})
    added = run("add", "k.db", "set/my.csv", "--embed", "pixels")
    assert (added.code, "'1.png' may be a/1.png or b/1.png" in added.err) == (0, True), added.err
    assert "1 added" in added.out
