"""Tables as people have them, added by `bottega add`."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.knowledge import load_hugging_face, load_jsonl, load_table
from bottega.knowledge.loaders import delimited
from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.cli.table_files import FILES, LABELS, added_labels, encoded, write_zip

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
