from __future__ import annotations

import base64
import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.report.exports import options, write_dataset
from bottega.image import Image
from bottega.types import Example, Query
from tests.builders import example, solid_image

PETS = labelled_benchmark(
    "image-folder:pets", [example("cat", 1)], [example("dog", 2), example("cat", 3)]
)
CHOICE_ITEM = Example(
    Query('Which\tone\n"now"?', (solid_image(5), solid_image(6)), ("a\tb", "c", "d"), id="q7"),
    "c",
    tags={"subject": "art", "level": "1"},
)
OPEN_ITEM = Example(Query("How many?", (solid_image(7),)), "3")
TEXT_ITEM = Example(Query("What is 1 + 1?", (), ("1", "2")), "2")
MIXED = Benchmark("mmmu:somewhere", (example("z", 9),), (CHOICE_ITEM, OPEN_ITEM, TEXT_ITEM))


def samples(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(autouse=True)
def long_fields() -> Iterator[None]:
    """Let the csv module, whose limit holds for the process, read base64 images."""
    before = csv.field_size_limit(1 << 30)
    yield
    csv.field_size_limit(before)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_inspect_reads_images_choices_and_letters(tmp_path: Path) -> None:
    found = samples(write_dataset(MIXED, "inspect", tmp_path / "x"))
    assert [one["target"] for one in found] == ["B", "3", "B"]
    assert found[0]["choices"] == ["a\tb", "c", "d"]
    assert "choices" not in found[1]
    assert (found[0]["id"], found[1]["id"], found[0]["metadata"]["level"]) == ("q7", "1", "1")
    [message] = found[0]["input"]
    *images, text_part = message["content"]
    assert text_part == {"type": "text", "text": CHOICE_ITEM.query.text}
    files = [Path(one["image"]) for one in images]
    assert all(file.is_absolute() for file in files)
    assert [Image.open(file) for file in files] == list(CHOICE_ITEM.query.images)


def test_vlmevalkit_reads_images_choices_and_letters(tmp_path: Path) -> None:
    path = write_dataset(MIXED, "vlmevalkit", tmp_path)
    assert path.name == "bottega_mmmu.tsv"
    found = rows(path)
    assert list(found[0]) == ["index", "image", "question", "A", "B", "C", "answer", "category"]
    assert [row["index"] for row in found] == ["0", "1", "2"]
    assert (found[0]["question"], found[0]["A"]) == (CHOICE_ITEM.query.text, "a\tb")
    assert [row["answer"] for row in found] == ["B", "3", "B"]
    assert (found[2]["image"], found[2]["C"], found[0]["category"]) == ("", "", "art")
    assert base64.b64decode(found[1]["image"]) == OPEN_ITEM.query.images[0].data
    encoded_images = orjson.loads(found[0]["image"].replace("'", '"'))
    assert [base64.b64decode(one) for one in encoded_images] == [
        i.data for i in CHOICE_ITEM.query.images
    ]


def test_labels_become_choices_up_to_26(tmp_path: Path) -> None:
    labels = PETS.labels
    assert options(PETS, PETS.items[0]) == labels
    found = rows(write_dataset(PETS, "vlmevalkit", tmp_path))
    assert [labels["AB".index(row["answer"])] for row in found] == ["dog", "cat"]
    many = replace(PETS, labels=tuple(f"l{i}" for i in range(26)) + labels)
    assert options(many, many.items[0]) == ()
    assert options(replace(PETS, multi_label=True), PETS.items[0]) == ()


def test_equal_images_share_one_file(tmp_path: Path) -> None:
    twice = replace(PETS, items=(PETS.items[0], PETS.items[0]))
    write_dataset(twice, "inspect", tmp_path)
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_unsupported_exports_raise(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="format is unknown"):
        write_dataset(PETS, "coco", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="is not writable"):
        write_dataset(PETS, "inspect", tmp_path / "file")
