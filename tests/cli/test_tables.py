"""Tables and archives as people have them, added by `bottega add`."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.image import MAX_BYTES
from bottega.knowledge import load_hugging_face, load_jsonl, load_table
from bottega.knowledge.loaders import archives, delimited
from tests.builders import solid_image
from tests.cli.conftest import Run

FILES = ("cat/1.png", "cat/2.png", "dog/1.png")
LABELS = {"cat": 2, "dog": 1}
IMAGES = {name: solid_image(shade).data for shade, name in enumerate(FILES)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write `FILES` into the current folder of `run`."""
    for shade, name in enumerate(FILES):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(solid_image(shade).data)
    return tmp_path


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def encoded(shade: int) -> str:
    return base64.b64encode(solid_image(shade).data).decode()


def added_labels(run: Run, *arguments: object) -> dict[str, int]:
    """Add the source and return the number of examples by answer."""
    added = run("add", "k.db", *arguments, "--embed", "pixels")
    assert added.code == 0, added.err
    listed: Any = run("ls", "k.db", "--limit", 100, "--json").json
    answers = [one["answer"] for one in listed]
    return {answer: answers.count(answer) for answer in sorted(set(answers))}


# Header and row.
CSV = {
    "usual names": ("image,label", "{file},{label}"),
    "Excel": ("\ufeffFile Name;Class", "{file};{label}"),
    "tabs": ("path\tcategory", "{file}\t{label}"),
    "other columns": ("id,label,note,filename", '7,{label},"a, b",{file}'),
    "Windows": ("image,label", "{windows},{label}"),
    "absolute": ("image,label", "{absolute},{label}"),
    "spaces around cells": ("image, label", '{file} , "{label}"'),
    "unnamed columns": ("image,label,,", "{file},{label},,"),
    "an unnamed column with notes": (",image,label", "7,{file},{label}"),
    "more delimiters than columns": ("image,label", "{file},{label},,"),
    "fewer delimiters than columns": ("image,label,,", "{file},{label}"),
    "Excel's separator": ("sep=;\r\nimage;label", "{file};{label}"),
    "names without suffix": ("image,label", "{stem},{label}"),
}


@pytest.mark.parametrize("form", CSV)
def test_csv_files_name_images_and_labels(run: Run, images: Path, form: str) -> None:
    header, row = CSV[form]
    rows = [
        row.format(
            file=name,
            windows=name.replace("/", "\\"),
            absolute=images / name,
            stem=name.removesuffix(".png"),
            label=name.partition("/")[0],
        )
        for name in FILES
    ]
    (images / "my.csv").write_text("\r\n".join([header, *rows]), encoding="utf-8")
    assert added_labels(run, "my.csv") == LABELS


def test_columns_with_other_names_are_asked_for(run: Run, images: Path) -> None:
    rows = [f"{name},{name[:3]}" for name in FILES]
    (images / "my.tsv").write_text("\n".join(["photo_of_animal,kind", *rows]))
    for options, missing in (
        ((), "--label-column"),
        (("--label-column", "kind"), "--image-column"),
        (("--label-column", "kinds", "--image-column", "photo_of_animal"), "column 'kinds'"),
        (
            ("--label-column", "kinds", "--image-column", "photo"),
            "column 'photo' does not exist; column 'kinds' does not exist",
        ),
        ((), "label and answer columns are missing; image and question columns are missing"),
    ):
        refused = run("add", "k.db", "my.tsv", *options)
        assert (refused.code, Path("k.db").exists()) == (1, False)
        assert missing in refused.err
        assert "its columns are photo_of_animal, kind" in refused.err
    named = ("--image-column", "Photo_of_Animal", "--label-column", "KIND")
    assert added_labels(run, "my.tsv", *named) == LABELS
    refused = run("add", "other.db", "cat", *named)
    assert (refused.code, "cat is not a table" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no line of column names"),
        ("image,image,label\n", "two columns 'image'"),
        ("image,label\n", "has no examples"),
        ("image,label\ngone.png,cat\n", "line 2: image 'gone.png' does not exist"),
        ("image,label\n../x.png,cat\n", "line 2"),
        (
            "image,label\nhttps://example.org/1.png,cat\n",
            "line 2: image 'https://example.org/1.png' is not fetched",
        ),
        ("image,label\ncat/1.png,cat,x\n", "line 2: expected 2 columns, got 3"),
        ("image,label\ncat/1.png\n", "line 2: expected 2 columns, got 1"),
        ("image,label\ncat/1.png,\n", "line 2: label is missing"),
        ("image,label\n,cat\n", "line 2: image is missing"),
        (f"image,label\ncat/1.png,{'x' * 10_000}\n", "line 2: the label has 10,000 characters"),
        ("image,label\ncat/\udcff.png,cat\n", "my.csv cannot be read"),
    ],
)
def test_bad_tables_are_named(run: Run, images: Path, text: str, expected: str) -> None:
    (images / "my.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
    failed = run("add", "k.db", "my.csv")
    assert (failed.code, Path("k.db").exists()) == (1, False)
    assert expected in failed.err


def test_bad_rows_do_not_stop_the_others(
    run: Run, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = csv.field_size_limit(100)
    monkeypatch.setattr(delimited, "MAX_CELL", 100)
    rows = [
        "image,label",
        f"cat/1.png,{'x' * 200}",
        *(f"{name},{name[:3]}" for name in FILES),
        "gone.png,cat",
        "a,b,c",
    ]
    (images / "my.csv").write_text("\n".join(rows))
    try:
        assert added_labels(run, "my.csv") == LABELS
    finally:
        csv.field_size_limit(previous)


def test_a_vlmevalkit_table_is_read(run: Run, tmp_path: Path) -> None:
    large = base64.b64encode(solid_image(1).data + bytes(200_000)).decode()
    rows = [
        "index\timage\tquestion\thint\tA\tB\tC\tD\tanswer\tcategory",
        f"1\t{large}\tWhich?\t\tcat\tdog\tbird\tfish\tB\tx",
        f"2\t{encoded(2)}\tIs it?\tIt is.\tyes\tno\t\t\tA\tx",
        "1000001\t1\tWhich?\t \tdog\tcat\tbird\tfish\tA\tx",
        "9\t8\tWhich?\t\tdog\tcat\tbird\tfish\tA\tx",
    ]
    (tmp_path / "MMBench.tsv").write_text("\n".join(rows))
    added: Any = run("add", "k.db", "MMBench.tsv", "--embed", "pixels", "--json")
    assert (added.code, added.json["new"]) == (0, 3)
    assert "line 5: no earlier row has the index 8" in added.err
    listed: Any = run("ls", "k.db", "--json").json
    found = {(one["question"], one["answer"]) for one in listed}
    assert found == {("Which?", "dog"), ("Hint: It is.\nIs it?", "yes")}


# Options A to D and the answer of a row: its reading, None for an invalid row.
LETTERED = {
    "an option of its own": ("x", "y", "z", "", "C", "z"),
    "an empty one before": ("x", "", "y", "z", "C", "y"),
    "the last": ("x", "", "y", "z", "D", "z"),
    "the empty one": ("x", "", "y", "z", "B", None),
    "a letter as text": ("C", "B", "A", "D", "A", "C"),
    "the text": ("x", "y", "z", "", "y", "y"),
    "a number as text": ("1", "2", "3", "4", "2", "2"),
    "an unknown letter": ("x", "y", "", "", "C", None),
}


@pytest.mark.parametrize("case", LETTERED)
def test_a_letter_names_its_column(run: Run, images: Path, case: str) -> None:
    *cells, expected = LETTERED[case]
    row = ",".join(["cat/1.png", "Which?", *map(str, cells)])
    Path("mcq.csv").write_text(f"image,question,A,B,C,D,answer\n{row}\n")
    if expected is None:
        refused = run("add", "k.db", "mcq.csv", "--embed", "pixels")
        assert refused.code == 1 and "answer must be a choice" in refused.err
    else:
        assert added_labels(run, "mcq.csv") == {expected: 1}


def test_quotation_marks_that_hide_rows_are_reported(run: Run, images: Path) -> None:
    rows = 'image,label\ncat/1.png,"cat\ncat/2.png,"cat"\ndog/1.png,dog\n'
    Path("my.csv").write_text(rows)
    done = run("add", "k.db", "my.csv", "--embed", "pixels")
    assert "1 added, 1 skipped" in done.out
    assert "in the row that begins in line 2" in done.err
    Path("open.csv").write_text('image,label\ncat/1.png,cat\ndog/1.png,"dog\ncat/2.png,cat\n')
    done = run("add", "o.db", "open.csv", "--embed", "pixels")
    assert "1 added, 1 skipped" in done.out
    assert "in the row that begins in line 3" in done.err
    assert "double the quotation marks" in done.err


def test_packed_lines_are_read(run: Run, images: Path) -> None:
    lines = "".join(json.dumps({"image": name, "label": name[:3]}) + "\n" for name in FILES)
    packed = gzip.compress(lines.encode())
    (images / "my.jsonl.gz").write_bytes(packed)
    assert added_labels(run, "my.jsonl.gz") == LABELS
    for damaged in (packed[:-12], b"no gzip"):
        (images / "bad.jsonl.gz").write_bytes(damaged)
        failed = run("add", "other.db", "bad.jsonl.gz")
        assert (failed.code, "bad.jsonl.gz" in failed.err) == (1, True)


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


def test_a_row_without_a_column_is_skipped(run: Run, images: Path) -> None:
    rows = [
        *({"label": "dog"}, {"file_name": FILES[0], "label": "cat"}, {"file_name": FILES[1]}, [1]),
        {"label": "dog", "question": None},
        {"file_name": FILES[1], "label": "cat", "question": None, "more": {"a": 1}},
        {"file_name": FILES[2], "label": "dog"},
    ]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    added: Any = run("add", "k.db", "metadata.jsonl", "--embed", "pixels", "--json")
    assert (added.code, added.json["new"]) == (0, 3)
    for line, problem in (
        (1, "image is missing"),
        (5, "image is missing"),
        (3, "label is missing"),
        (4, "the line must be an object, got list"),
    ):
        assert f"line {line}: {problem}" in added.err


def test_a_snapshot_of_the_hub_is_read(run: Run, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    blob = tmp_path / "blobs" / "0a1b"
    blob.parent.mkdir()
    columns = {"image": [encoded(1), encoded(2)], "choices": [["cat", "dog"]] * 2}
    answers = pa.array([1, 0])
    parquet.write_table(pa.table({**columns, "question": ["a", "b"], "answer": answers}), blob)
    data = tmp_path / "snapshot" / "data"
    data.mkdir(parents=True)
    (data / "train-00000-of-00001.parquet").symlink_to(os.path.relpath(blob, data))
    assert added_labels(run, "snapshot") == {"cat": 1, "dog": 1}


def cached_data_set(hub: Path, name: str, files: dict[str, bytes], revision: str = "a1") -> Path:
    """Write a data set as the hub's client caches it: a snapshot of links to blobs."""
    repository = hub / f"datasets--{name}"
    for path, data in files.items():
        link = repository / "snapshots" / revision / path
        blob = repository / "blobs" / f"{revision}-{path.replace('/', '-')}"
        for folder in (link.parent, blob.parent, repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs" / "main").write_text(revision)
    return repository


NAMED = "file_name,label\n" + "".join(f"{name},{name[:3]}\n" for name in FILES)


@pytest.mark.parametrize("files", [IMAGES, {**IMAGES, "metadata.csv": NAMED.encode()}])
def test_a_cache_of_the_hub_is_read(run: Run, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub = tmp_path / "hub"
    old = {"old/1.png": solid_image(9).data}
    cached_data_set(hub, "me--pets", old, "a0")
    cached_data_set(hub, "me--pets", {**files, ".gitattributes": b"x"}, "a1")
    (hub / "models--me--vlm" / "snapshots" / "b1").mkdir(parents=True)
    for source in (hub, hub / "datasets--me--pets", hub / "datasets--me--pets/snapshots/a1"):
        (tmp_path / "k.db").unlink(missing_ok=True)
        assert added_labels(run, source) == LABELS
    has_table = "metadata.csv" in files
    table = hub / "datasets--me--pets/snapshots/a1/metadata.csv"
    planned = run("eval", f"image-folder:{hub}", "--methods", "nearest", "--dry-run")
    assert (planned.code, f"table:{table}" in planned.err) == (int(has_table), has_table)
    if has_table:
        assert run("eval", f"table:{table}", "--methods", "nearest", "--dry-run").code == 0
    outside = "file_name,label\n../../../../secret.png,cat\n"
    cached_data_set(hub, "me--pets", {"metadata.csv": outside.encode()}, "a2")
    (tmp_path / "secret.png").write_bytes(solid_image(3).data)
    refused = run("add", "other.db", hub)
    assert (refused.code, "is outside of" in refused.err) == (1, True)


def test_a_cache_of_the_hub_needs_one_data_set(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--me--vlm" / "snapshots" / "b1").mkdir(parents=True)
    refused = run("add", "k.db", "hub")
    assert (refused.code, "the Hugging Face hub with 0 data sets" in refused.err) == (1, True)
    for name in ("me--cats", "me--dogs"):
        cached_data_set(tmp_path / "hub", name, IMAGES)
    refused = run("add", "k.db", "hub")
    assert "name one: hub/datasets--me--cats, hub/datasets--me--dogs" in refused.err


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


# The values of a column of labels in CSV, JSON and Python, and the label of all formats.
VALUES: dict[str, tuple[str, object, str]] = {
    "a negative number": ("-1", -1, "-1"),
    "a whole number": ("7", 7, "7"),
    "a whole float": ("1.0", 1.0, "1"),
    "zero": ("0.0", 0.0, "0"),
    "a fraction": ("2.5", 2.5, "2.5"),
    "true": ("True", True, "True"),
    "false": ("False", False, "False"),
    "an id": ("007", "007", "007"),
    "a version": ("1.0.0", "1.0.0", "1.0.0"),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("form", ["csv", "jsonl", "labels", "metadata.jsonl", "parquet"])
@pytest.mark.parametrize("case", VALUES)
def test_a_label_is_the_same_in_all_formats(images: Path, case: str, form: str) -> None:
    cell, value, expected = VALUES[case]
    row = {"image": FILES[0], "label": value}
    if form == "csv":
        Path("my.csv").write_text(f"image,label\n{FILES[0]},{cell}\n")
        [found] = load_table("my.csv")
    elif form == "metadata.jsonl":
        Path(form).write_text(json.dumps(row))
        [found] = load_table(form)
    elif form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pytest.importorskip("datasets")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([row]), "my.parquet")
        [found] = load_hugging_face("my.parquet")
    else:
        lists = {"image": FILES[0], "labels": [value]}
        Path("my.jsonl").write_text(json.dumps(lists if form == "labels" else row))
        [found] = load_jsonl("my.jsonl")
    assert found.answer == expected


# A cell of labels or of answers: the labels and the answer.
CELLS: dict[str, tuple[str, str, tuple[str, ...] | None, str]] = {
    "as Python prints it": ("label", "['pug', 'dog']", ("pug", "dog"), "pug, dog"),
    "as JSON": ("label", '["pug","dog"]', ("pug", "dog"), "pug, dog"),
    "as NumPy prints it": ("label", "['pug' 'dog']", ("pug", "dog"), "pug, dog"),
    "numbers": ("label", "[1, 2.0]", ("1", "2"), "1, 2"),
    "an empty list": ("label", "[]", (), "none"),
    "a text in brackets": ("label", "[sic] dog", None, "[sic] dog"),
    "a quoted text in brackets": ("label", "[sic] 'dog'", None, "[sic] 'dog'"),
    "words in brackets": ("label", "[pug, dog]", None, "[pug, dog]"),
    "answers of annotators": ("answer", "['no', 'yes', 'yes']", None, "yes"),
    "an interval": ("answer", "[1, 2]", None, "[1, 2]"),
    "an answer in brackets": ("answer", "[sic] dog", None, "[sic] dog"),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", CELLS)
def test_a_printed_list_is_a_list(images: Path, case: str) -> None:
    column, cell, labels, answer = CELLS[case]
    with Path("my.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", column], [FILES[0], cell]])
    [found] = load_table("my.csv")
    assert (found.labels, found.answer) == (labels, answer)


@pytest.mark.parametrize("suffix", [".JSONL", ".Csv", ".PARQUET"])
def test_suffixes_may_have_upper_case(run: Run, images: Path, suffix: str) -> None:
    rows = [{"image": name, "label": name.split("/")[0]} for name in FILES]
    path = images / f"my{suffix}"
    if suffix == ".PARQUET":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        parquet.write_table(table, path)
    elif suffix == ".JSONL":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        path.write_text(
            "image,label\n" + "".join(f"{row['image']},{row['label']}\n" for row in rows)
        )
    assert added_labels(run, path.name) == LABELS


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


def evaluated(run: Run, benchmark: str, *options: str) -> tuple[int, int, int]:
    """Return the numbers of labelled examples, items and labels of an evaluation."""
    ran = run("eval", benchmark, "--methods", "nearest", "--json", "run.json", *options)
    assert ran.code == 0, ran.err
    found = json.loads(Path("run.json").read_text())
    return found["knowledge_base"], found["items"], found["labels"]


def test_zips_and_tables_are_evaluated(run: Run, images: Path) -> None:
    classes = {f"{label}/{n}.png": solid_image(n).data for n in range(8) for label in ("cat",)}
    classes |= {f"dog/{n}.png": solid_image(n + 8).data for n in range(4)}
    write_zip(images / "plain.zip", classes)
    assert evaluated(run, "image-folder:plain.zip") == (9, 3, 2)
    splits = {f"x/{('train', 'Valid')[i % 2]}/{k}": v for i, (k, v) in enumerate(classes.items())}
    write_zip(images / "splits.zip", splits)
    assert evaluated(run, "image-folder:splits.zip") == (6, 6, 2)
    write_zip(images / "val.zip", {k: v for k, v in splits.items() if "Valid" in k})
    refused = run("eval", "image-folder:val.zip", "--methods", "nearest")
    assert "has Valid/, but not one train/ and one test/" in refused.err
    for path, data in classes.items():
        (images / path).write_bytes(data)
    rows = [f"{name},{name[:3]}" for name in classes]
    (images / "my.csv").write_text("\n".join(["kind of photo,species", *rows]))
    (images / "a.csv").write_text("\n".join(["image,label", *rows[::2]]))
    (images / "b.tsv").write_text("\n".join(["image,label", *rows[1::2]]).replace(",", "\t"))
    assert evaluated(run, "table:a.csv,b.tsv") == (6, 6, 2)
    unnamed = run("eval", "table:my.csv", "--methods", "nearest")
    assert (unnamed.code, "image_column=NAME" in unnamed.err) == (1, True)
    assert evaluated(run, "table:my.csv,image_column=kind of photo") == (9, 3, 2)
    for wrong, named in {
        "my.csv": "use table:my.csv",
        "plain.zip": "use image-folder:plain.zip",
        "table:none.csv": "none.csv does not exist",
        "table:plain.zip": "plain.zip is not a table",
        "table:a.csv,scoring=loose": "scoring is unknown",
    }.items():
        refused = run("eval", wrong, "--methods", "nearest")
        assert refused.code != 0 and named in refused.err


def test_tables_of_questions_are_split_at_random(run: Run, images: Path) -> None:
    rows = [f"{FILES[n % 3]}\tQuestion {n}?\tanswer {n}" for n in range(12)]
    (images / "open.tsv").write_text("\n".join(["image\tquestion\tanswer", *rows]))
    chosen = [f"{FILES[n % 3]}\tQuestion {n}?\tyes\tno\tB" for n in range(12)]
    (images / "mcq.tsv").write_text("\n".join(["image\tquestion\tA\tB\tanswer", *chosen]))
    for name, metric in (("open", "same_answer"), ("mcq", "accuracy")):
        data = load_benchmark(f"table:{name}.tsv", seed=0)
        assert (len(data.knowledge), len(data.items), data.labels) == (9, 3, ())
        assert data.metrics[0].name == metric
