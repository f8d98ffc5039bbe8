from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.types import Answer
from tests.builders import solid_image
from tests.evaluation.benchmarks.published import (
    image_cell,
    write_archive,
    write_image,
    write_json,
    write_table,
)

SURFING = ["surf"] * 4 + ["swim"] * 6


def questions(numbers: Sequence[int]) -> dict[str, object]:
    """Return the content of `OpenEnded_mscoco_*_questions.json`."""
    rows = [
        {"image_id": n, "question": f"What is done in {n}?", "question_id": 10 * n + 5}
        for n in numbers
    ]
    return {"info": {}, "task_type": "Open-Ended", "questions": rows}


def noted(numbers: Sequence[int], reply: Sequence[str] = SURFING) -> dict[str, object]:
    """Return the content of `mscoco_*_annotations.json`."""
    answers = [
        {"answer_id": i, "raw_answer": f"{one}ing", "answer_confidence": "yes", "answer": one}
        for i, one in enumerate(reply, 1)
    ]
    rows = [
        {
            "image_id": n,
            "answer_type": "other",
            "question_type": "four",
            "question_id": 10 * n + 5,
            "answers": answers,
            "confidence": 3,
        }
        for n in numbers
    ]
    return {"info": {}, "annotations": rows}


def published(root: Path, **parts: Sequence[int]) -> Path:
    for split, numbers in parts.items():
        write_json(root / f"OpenEnded_mscoco_{split}_questions.json", questions(numbers))
        write_json(root / f"mscoco_{split}_annotations.json", noted(numbers))
        for number in numbers:
            write_image(root / split / f"COCO_{split}_{number:012}.jpg", number)
    return root


def test_published_files_are_read(tmp_path: Path) -> None:
    data = load_benchmark(f"okvqa:{published(tmp_path, train2014=[1, 2, 3], val2014=[7])}", seed=0)
    assert (len(data.knowledge), len(data.items), data.labels) == (3, 1, ())
    (item,) = data.items
    assert (item.query.id, item.query.text) == ("75", "What is done in 7?")
    assert (item.query.images, item.answer) == ((solid_image(7),), "swim")
    official, normalised = data.metrics
    assert official.name == "vqa_accuracy_original"
    assert official.score(item, Answer("Surf!")) == 1
    assert normalised.score(item, Answer("nothing")) == 0


def test_downloaded_archives_are_read(tmp_path: Path) -> None:
    published(tmp_path, train2014=[1], val2014=[7])
    for name in ("mscoco_val2014_annotations.json", "OpenEnded_mscoco_val2014_questions.json"):
        write_archive(tmp_path / f"{name}.zip", {name: (tmp_path / name).read_bytes()})
        (tmp_path / name).unlink()
    name = f"COCO_val2014_{7:012}.jpg"
    write_archive(tmp_path / "val2014.zip", {f"val2014/{name}": solid_image(7).data})
    (tmp_path / "val2014" / name).unlink()
    (tmp_path / "val2014").rmdir()
    data = load_benchmark(f"okvqa:{tmp_path}", seed=0)
    assert [item.query.images for item in data.items] == [(solid_image(7),)]


def test_invalid_rows_are_reported_and_skipped(tmp_path: Path) -> None:
    published(tmp_path, train2014=[1], val2014=[5, 6, 7, 8, 9])
    (tmp_path / "val2014" / f"COCO_val2014_{5:012}.jpg").unlink()
    (tmp_path / "val2014" / f"COCO_val2014_{6:012}.jpg").write_bytes(b"no image")
    write_json(tmp_path / "mscoco_val2014_annotations.json", noted([5, 6, 8, 9]))
    queries = questions([5, 6, 7, 8, 9, 9])
    rows = queries["questions"]
    assert isinstance(rows, list)
    rows.append({"question_id": 1, "image_id": "../1", "question": "?"})
    rows.append({"image_id": 9})
    write_json(tmp_path / "OpenEnded_mscoco_val2014_questions.json", queries)
    bad: list[BottegaError] = []
    data = load_benchmark(f"okvqa:{tmp_path}", seed=0, on_error=bad.append)
    assert sorted(str(item.query.id) for item in data.items) == ["85", "95"]
    for error, reply in zip(
        bad,
        (
            "cannot be read",
            "not a readable image",
            "has no answers",
            "is not unique",
            "has no answers",
            "question_id is missing",
        ),
        strict=True,
    ):
        assert reply in str(error)
        assert "questions.json, row" in str(error)
    with pytest.raises(LoadError, match="row 0"):
        load_benchmark(f"okvqa:{tmp_path}", seed=0)


@pytest.mark.parametrize(
    "missing",
    [
        "OpenEnded_mscoco_train2014_questions.json",
        "mscoco_val2014_annotations.json",
        "OpenEnded_mscoco_val2014_questions.json",
    ],
)
def test_missing_files_name_the_download(tmp_path: Path, missing: str) -> None:
    published(tmp_path, train2014=[1], val2014=[7])
    (tmp_path / missing).unlink()
    with pytest.raises(LoadError) as raised:
        load_benchmark(f"okvqa:{tmp_path}", seed=0)
    assert "okvqa.allenai.org" in raised.value.hint


def test_missing_images_raise_one_error(tmp_path: Path) -> None:
    published(tmp_path, train2014=[1], val2014=[7])
    (tmp_path / "train2014").rename(tmp_path / "elsewhere")
    bad: list[BottegaError] = []
    with pytest.raises(LoadError, match="has no train2014"):
        load_benchmark(f"okvqa:{tmp_path}", seed=0, on_error=bad.append)
    assert bad == []


def row(number: int, **others: object) -> dict[str, object]:
    """Return a row of the hub's table."""
    return {
        "question_id": str(number),
        "image": image_cell(number),
        "question": f"What is done in {number}?",
        "answers": SURFING,
        "question_type": "four",
        "answer_type": "other",
        **others,
    }


def test_table_row_without_an_image_is_text_only(tmp_path: Path) -> None:
    write_table(tmp_path / "data" / "train-00000-of-00001.parquet", [row(1), row(2)])
    queries = [row(7), row(8, image=None), row(9, answers=[])]
    write_table(tmp_path / "data" / "val2014-00000-of-00001.parquet", queries)
    bad: list[BottegaError] = []
    data = load_benchmark(f"okvqa:{tmp_path}", seed=0, on_error=bad.append)
    assert (len(data.knowledge), len(data.items)) == (2, 2)
    assert {item.query.id: item.query.images for item in data.items} == {
        "7": (solid_image(7),),
        "8": (),
    }
    assert data.metrics[0].score(data.items[0], Answer("swim")) == 1
    assert ["has no answers" in str(error) for error in bad] == [True]


def test_mirror_without_training_split_names_its_source(tmp_path: Path) -> None:
    write_table(tmp_path / "data" / "val2014-00000-of-00001.parquet", [row(7)])
    with pytest.raises(LoadError, match="no example split") as raised:
        load_benchmark(f"okvqa:{tmp_path}", seed=0)
    assert "okvqa.allenai.org" in raised.value.hint
