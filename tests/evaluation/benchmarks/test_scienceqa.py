from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError, SettingError
from bottega.evaluation.benchmark import fingerprint
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.scienceqa import scienceqa
from bottega.evaluation.benchmarks.source import Source
from bottega.prompting import SCIENCE_QA, SCIENCE_QA_REASONED
from bottega.types import Completion, Query
from tests.builders import solid_image

SPLITS = {"train": ["1", "2"], "val": ["3"], "test": ["4", "5"]}


def problem(**changed: object) -> dict[str, object]:
    return {
        "question": "Which is larger?",
        "choices": ["a pea", "the moon"],
        "answer": 1,
        "hint": "",
        "image": None,
        "task": "closed choice",
        "grade": "grade2",
        "subject": "natural science",
        "topic": "physics",
        "category": "Size",
        "skill": "Compare sizes",
        "lecture": "",
        "solution": "",
        "split": "train",
    } | changed


PROBLEMS = {
    "1": problem(image="image.png", lecture="Sizes differ.", solution="The moon is."),
    "2": problem(question="Which is a mammal?", choices=["ant", "bat", "cod"]),
    "3": problem(question="Which flies?", choices=["a stone", "a bird"]),
    "4": problem(choices=["the sun", "the moon"], answer=0, hint="Look at the sky."),
    "5": problem(image="image.png", question="What is this?", choices=["red", "blue"], answer=0),
}


def published(root: Path, images: str = "") -> Path:
    for split, pids in SPLITS.items():
        for pid in pids:
            if PROBLEMS[pid]["image"]:
                folder = root / images / split / pid
                folder.mkdir(parents=True)
                (folder / "image.png").write_bytes(solid_image(int(pid)).data)
    (root / "problems.json").write_text(json.dumps(PROBLEMS), "utf-8")
    splits = SPLITS | {"trainval": ["1", "2", "3"], "minitest": ["4"]}
    (root / "pid_splits.json").write_text(json.dumps(splits), "utf-8")
    return root


@pytest.mark.parametrize("images", ["", "images"])
def test_questions_with_and_without_images(tmp_path: Path, images: str) -> None:
    data = scienceqa(Source(f"scienceqa:{published(tmp_path, images)}", 0))
    assert [e.query.id for e in data.knowledge] == ["1", "2", "3"]
    assert [e.query for e in data.items] == [
        Query("Which is larger?\nContext: Look at the sky.", (), ("the sun", "the moon"), "4"),
        Query("What is this?", (solid_image(5),), ("red", "blue"), "5"),
    ]
    assert [e.answer for e in data.items] == ["the sun", "red"]
    assert data.knowledge[0].query.images == (solid_image(1),)
    assert data.knowledge[0].tags["topic"] == "physics"


def test_lectures_and_solutions_are_rationales_on_request(tmp_path: Path) -> None:
    spec = f"scienceqa:{published(tmp_path)}"
    generated, given = (
        scienceqa(Source(f"{spec}{options}", 0)) for options in ("", ",rationales=given")
    )
    assert [one.rationale for one in (*generated.knowledge, *generated.items)] == [None] * 5
    rationales = [one.rationale for one in given.knowledge]
    assert rationales == ["Sizes differ.\nThe moon is.", None, None]
    assert fingerprint(generated) != fingerprint(given)
    with pytest.raises(SettingError, match="rationales is unknown, got 'gold'"):
        scienceqa(Source(f"{spec},rationales=gold", 0))


def test_replies_are_parsed_and_scored(tmp_path: Path) -> None:
    data = scienceqa(Source(f"scienceqa:{published(tmp_path)}", 0))
    item = data.items[0]
    scores = [
        data.metrics[0].score(item, data.parse(item.query, Completion(reply)))
        for reply in ("A", "The answer is (A).", "The Sun", "B", "neither")
    ]
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert (data.prompt, data.rationale_prompt) == (SCIENCE_QA, SCIENCE_QA_REASONED)
    reply = (
        "**THOUGHT PROCESS:** B is dark.\n**FINAL ANSWER:** The answer is A. BECAUSE: It shines."
    )
    answer = data.parse(item.query, Completion(reply))
    assert (answer.text, answer.rationale) == ("the sun", "B is dark.\nIt shines.")


def test_equal_text_with_other_choices_is_another_question(tmp_path: Path) -> None:
    """Text-only questions overlap only if their choices are equal too."""
    folder = published(tmp_path)
    for choices, is_other in ((["cow", "bat", "ant"], True), (["cod", "bat", "ant"], False)):
        again = PROBLEMS | {"5": problem(question="Which is a mammal?", choices=choices)}
        (folder / "problems.json").write_text(json.dumps(again), "utf-8")
        if is_other:
            assert len(load_benchmark(f"scienceqa:{folder}", seed=0).items) == 2
            continue
        with pytest.raises(LoadError, match="1 of 2 test items"):
            load_benchmark(f"scienceqa:{folder}", seed=0)


def test_table_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for split, pids in (("train", ["1", "2"]), ("validation", ["3"]), ("test", ["4", "5"])):
        rows = [
            PROBLEMS[p]
            | {
                "image": {"bytes": solid_image(int(p)).data, "path": None}
                if PROBLEMS[p]["image"]
                else None
            }
            for p in pids
        ]
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    data = scienceqa(Source(f"scienceqa:{tmp_path}", 0))
    assert (len(data.knowledge), len(data.items)) == (3, 2)
    text_only, pictured = data.items
    assert (text_only.query.images, pictured.query.images) == ((), (solid_image(5),))
    assert text_only.query.id == "test-00000-of-00001.parquet, row 0"


def test_invalid_problems_are_reported(tmp_path: Path) -> None:
    folder = published(tmp_path)
    bad = {"2": problem(answer=7), "4": problem(image="../../problems.json"), "3": 5}
    (folder / "problems.json").write_text(json.dumps(PROBLEMS | bad), "utf-8")
    errors: list[BottegaError] = []
    data = scienceqa(Source(f"scienceqa:{folder}", 0, errors.append))
    assert [e.query.id for e in (*data.knowledge, *data.items)] == ["1", "5"]
    assert [str(e).partition(", ")[2][:9] for e in errors] == [
        "problem 2",
        "problem 3",
        "problem 4",
    ]
    (folder / "pid_splits.json").unlink()
    with pytest.raises(LoadError, match=r"pid_splits\.json cannot be read"):
        scienceqa(Source(f"scienceqa:{folder}", 0))
