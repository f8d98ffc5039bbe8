from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.metrics.metric import Judgement
from bottega.prompting import VIZ_WIZ
from bottega.types import Answer, Query
from tests.builders import solid_image
from tests.evaluation.benchmarks.published import (
    image_cell,
    write_archive,
    write_image,
    write_json,
    write_table,
)


def row(image: str, reply: str, **others: object) -> dict[str, object]:
    """Return a row as in VizWiz's train.json and val.json."""
    answers = [{"answer": reply, "answer_confidence": "yes"}] * 8
    return {
        "image": image,
        "question": f"What is in {image}?",
        "answers": [*answers, *[{"answer": "soup", "answer_confidence": "maybe"}] * 2],
        "answer_type": "other",
        "answerable": 1,
        **others,
    }


QUERIES = [
    row("VizWiz_val_00000000.jpg", "tomato soup"),
    row("VizWiz_val_00000001.jpg", "unanswerable", answer_type="unanswerable", answerable=0),
]


def published(root: Path) -> Path:
    write_json(root / "Annotations" / "train.json", [row("VizWiz_train_00000000.jpg", "beer")])
    write_json(root / "Annotations" / "val.json", QUERIES)
    write_image(root / "train" / "VizWiz_train_00000000.jpg", 3)
    write_image(root / "val" / "VizWiz_val_00000000.jpg", 4)
    write_image(root / "val" / "VizWiz_val_00000001.jpg", 5)
    return root


def test_published_folders_are_read(tmp_path: Path) -> None:
    data = load_benchmark(f"vizwiz:{published(tmp_path)}", seed=0)
    assert (len(data.knowledge), len(data.items)) == (1, 2)
    items = {str(item.query.id): item for item in data.items}
    clear, blurred = (items[f"VizWiz_val_0000000{i}.jpg"] for i in range(2))
    assert (clear.query.images, clear.answer) == ((solid_image(4),), "tomato soup")
    assert (blurred.answer, blurred.tags) == ("unanswerable", {"answerable": "0"})
    assert [metric.name for metric in data.metrics] == [
        "vizwiz_accuracy",
        "vqa_accuracy_always-normalised",
        "answerability_ap",
        "answerability_f1",
    ]
    official, _, precision, _ = data.metrics
    assert official.score(clear, Answer("soup")) == pytest.approx((2 * 1 + 8 * 2) / 3 / 10)
    answer = Answer("Unanswerable")
    judged = [Judgement(one, answer, precision.score(one, answer)) for one in data.items]
    assert sorted(one.score for one in judged) == [0, 1]


def test_prompt_defines_the_unanswerable_reply(tmp_path: Path) -> None:
    data = load_benchmark(f"vizwiz:{published(tmp_path)}", seed=0)
    assert data.prompt is not None
    prompt = data.prompt(Query("What is this?", (solid_image(1),)), [])
    assert "unanswerable" in str(prompt.messages[-1].parts[-1])
    assert (data.prompt, data.rationale_prompt) == (VIZ_WIZ, None)


def test_downloaded_archives_are_read(tmp_path: Path) -> None:
    """`val.zip` contains the folder; `Annotations.zip` exists with and without it."""
    root, archives = published(tmp_path / "unpacked"), tmp_path / "there"
    notes = {path.name: path.read_bytes() for path in (root / "Annotations").iterdir()}
    write_archive(archives / "Annotations.zip", notes)
    for split in ("train", "val"):
        members = {f"{split}/{path.name}": path.read_bytes() for path in (root / split).iterdir()}
        write_archive(archives / f"{split}.zip", members)
    packed, unpacked = (load_benchmark(f"vizwiz:{folder}", seed=0) for folder in (archives, root))
    assert [item.query for item in packed.items] == [item.query for item in unpacked.items]


def test_table_category_marks_unanswerable_items(tmp_path: Path) -> None:
    def entry(number: int, category: str) -> dict[str, object]:
        return {
            "question_id": f"VizWiz_val_{number:08}",
            "image": image_cell(number),
            "question": "What is this?",
            "answers": ["soup"] * 10,
            "category": category,
        }

    write_table(tmp_path / "data" / "train-0.parquet", [entry(1, "other")])
    write_table(tmp_path / "data" / "val-0.parquet", [entry(2, "other"), entry(3, "unanswerable")])
    data = load_benchmark(f"vizwiz:{tmp_path}", seed=0)
    assert sorted(item.tags["answerable"] for item in data.items) == ["0", "1"]
    assert len(data.metrics) == 4


def test_hub_table_without_images_raises(tmp_path: Path) -> None:
    write_table(tmp_path / "data" / "val-0.parquet", [{"question_id": "a"}])
    with pytest.raises(LoadError, match="no example split") as raised:
        load_benchmark(f"vizwiz:{tmp_path}", seed=0)
    assert "vizwiz.org" in raised.value.hint


def test_rows_without_answers_or_images_are_reported(tmp_path: Path) -> None:
    published(tmp_path)
    hidden = {"image": "VizWiz_val_00000000.jpg", "question": "?"}
    outside = row("../Annotations/val.json", "beer")
    write_json(tmp_path / "Annotations" / "val.json", [*QUERIES, hidden, outside])
    bad: list[BottegaError] = []
    assert len(load_benchmark(f"vizwiz:{tmp_path}", seed=0, on_error=bad.append).items) == 2
    assert ["row 2: the question has no answers" in str(bad[0]), "row 3" in str(bad[1])] == [
        True,
        True,
    ]


def test_examples_are_scored_by_all_annotators(tmp_path: Path) -> None:
    data = load_benchmark(f"vizwiz:{published(tmp_path)}", seed=0)
    [example], metric = data.knowledge, data.reward_metric
    assert metric is not None
    # Eight annotators wrote "beer", two "soup".
    scores = [metric.score(example, Answer(said)) for said in ("Beer.", "soup", "wine")]
    assert scores == [1.0, pytest.approx((8 * 2 / 3 + 2 * 1 / 3) / 10), 0.0]
    assert data.order == "nearest-first"
