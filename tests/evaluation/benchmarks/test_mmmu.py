from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError, SettingError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.mmmu import mmmu
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.methods.master_answers import labelled_questions, with_answers
from bottega.prompting import MMMU, MMMU_REASONED
from bottega.types import Completion, Example, Query
from tests.builders import solid_image

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def row(number: str, shades: list[int], **changed: object) -> dict[str, object]:
    images = {f"image_{i}": None for i in range(1, 8)} | {
        f"image_{i}": {"bytes": solid_image(shade).data, "path": "x.png"}
        for i, shade in enumerate(shades, 1)
    }
    return {
        "id": number,
        "question": f"{number}: what is in <image 1>?",
        "options": r"['a cat', '$\\frac{1}{2}$', 'it\'s <image 2>']",
        "explanation": "",
        "img_type": "['Photographs']",
        "answer": "B",
        "topic_difficulty": "Easy",
        "question_type": "multiple-choice",
        "subfield": "?",
        **images,
        **changed,
    }


def write_json(folder: Path, split: str, *rows: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(
        pa.Table.from_pylist(list(rows)), folder / f"{split}-00000-of-00001.parquet"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write two subject folders, as in MMMU/MMMU."""
    queries = (
        row("dev_Art_Theory_1", [1], explanation="Half of it."),
        row("dev_Art_Theory_2", [2, 3]),
    )
    write_json(tmp_path / "Art_Theory", "dev", *queries)
    write_json(tmp_path / "Art_Theory", "validation", row("validation_Art_Theory_1", [4]))
    multiple_answers = row("validation_Math_1", [5], options="[]", answer="['24/7', '3.429']")
    one = row("validation_Math_2", [6, 7], options="[]", answer="12")
    write_json(tmp_path / "Math", "dev", row("dev_Math_1", [8]))
    write_json(tmp_path / "Math", "validation", multiple_answers, one)
    return tmp_path


def ids(examples: tuple[Example, ...]) -> list[str | None]:
    return [example.query.id for example in examples]


def test_dev_is_evaluated_with_validation_as_examples(root: Path) -> None:
    data = mmmu(Source(f"mmmu:{root}", 0))
    assert ids(data.items) == ["dev_Art_Theory_1", "dev_Art_Theory_2", "dev_Math_1"]
    assert ids(data.knowledge) == [
        "validation_Art_Theory_1",
        "validation_Math_1",
        "validation_Math_2",
    ]
    first, second, _ = data.items
    assert first.query.choices == ("a cat", r"$\frac{1}{2}$", "it's <image 2>")
    assert (first.answer, first.rationale) == (r"$\frac{1}{2}$", "Half of it.")
    assert first.tags == {"subject": "Art_Theory", "difficulty": "Easy"}
    assert second.query.images == (solid_image(2), solid_image(3))


def test_validation_can_be_evaluated_and_images_filtered(root: Path) -> None:
    data = mmmu(Source(f"mmmu:{root},split=validation,images=one", 0))
    assert ids(data.items) == ["validation_Art_Theory_1", "validation_Math_1"]
    assert ids(data.knowledge) == ["dev_Art_Theory_1", "dev_Math_1"]


def test_replies_are_parsed_and_scored(root: Path) -> None:
    data = mmmu(Source(f"mmmu:{root},split=validation", 0))
    choice, multiple_answers, one = data.items
    assert multiple_answers.answer == "24/7"
    [metric] = data.metrics
    for item, reply, score in [
        (choice, "It is (B).", 1.0),
        (choice, "It is (A).", 0.0),
        (choice, "no idea", 0.0),
        (multiple_answers, "It is 3.43", 1.0),
        (multiple_answers, "24/7", 1.0),
        (one, "x = 12", 1.0),
        (one, "x = 13", 0.0),
    ]:
        assert metric.score(item, data.parse(item.query, Completion(reply))) == score
    assert data.prompt is not None
    _, choosing = data.prompt(choice.query, []).messages
    assert "(A) a cat\n(B)" in str(choosing.parts[-1])
    assert "option letter" in str(choosing.parts[-1])
    _, opened = data.prompt(multiple_answers.query, []).messages
    assert "option letter" not in str(opened.parts[-1])
    assert (data.prompt, data.rationale_prompt) == (MMMU, MMMU_REASONED)
    answer = data.parse(choice.query, Completion("The answer is B. BECAUSE: A is out."))
    assert (answer.text, answer.rationale) == (choice.query.choices[1], "A is out.")


@pytest.mark.parametrize(("scoring", "read"), [("", "Rome"), (",scoring=lenient", "Paris")])
def test_official_rules_are_an_option(root: Path, scoring: str, read: str) -> None:
    data = load_benchmark(f"mmmu:{root},split=validation{scoring}", seed=0)
    query = Query("Which?", choices=("Rome", "Paris"))
    answer = data.parse(query, Completion("(B) is right, I think. Option (A) is wrong."))
    assert answer.text == read


def test_official_random_fallback_is_an_option(root: Path) -> None:
    data = mmmu(Source(f"mmmu:{root},unparsable=random", 5))
    assert data.metrics[0].name == "mmmu_accuracy_random"
    assert data.parse(data.items[0].query, Completion("no idea")).valid
    with pytest.raises(SettingError) as raised:
        mmmu(Source(f"mmmu:{root},split=test", 0))
    assert raised.value.hint == "use dev or validation"


@pytest.mark.parametrize(
    "changed",
    [
        {"options": "__import__('os')"},
        {"options": "{'a': 1}"},
        {"options": "[1, 2]"},
        {"options": "[" * 5000},
        {"options": "{[1]}"},
        {"options": None},
        {"answer": "D"},
        {"answer": "AB"},
        {"answer": "?"},
        {"question": " "},
        {"image_1": {"bytes": b"no image", "path": None}},
    ],
)
def test_invalid_rows_are_reported(tmp_path: Path, changed: dict[str, object]) -> None:
    write_json(tmp_path, "validation", row("validation_Art_1", [1]))
    good, bad = row("dev_Art_1", [2]), row("dev_Art_2", [3]) | changed
    write_json(tmp_path, "dev", good)
    parquet.write_table(pa.Table.from_pylist([bad]), tmp_path / "dev-00001-of-00001.parquet")
    errors: list[BottegaError] = []
    data = mmmu(Source(f"mmmu:{tmp_path}", 0, errors.append))
    assert ids(data.items) == ["dev_Art_1"]
    [error] = errors
    assert "dev-00001-of-00001.parquet, row 0" in str(error)
    assert error.hint


def test_benchmark_loads_by_name(root: Path) -> None:
    data = load_benchmark(f"mmmu:{root}", seed=0, limit=2)
    assert (len(data.knowledge), len(data.items)) == (3, 2)
    empty = root / "Art_Theory" / "empty"
    empty.mkdir()
    with pytest.raises(LoadError, match="split 'validation'"):
        load_benchmark(f"mmmu:{empty}", seed=0)


def test_questions_of_test_need_a_masters_answers(root: Path) -> None:
    unanswered = row("test_Math_1", [9], answer="?")
    write_json(
        root / "Math", "test", unanswered, row("test_Math_2", [10], options="[]", answer="?")
    )
    data = load_benchmark(f"mmmu:{root},knowledge=test", seed=0)
    assert sorted(map(str, ids(data.knowledge))) == ["test_Math_1", "test_Math_2"]
    assert data.needs_answers
    questions = labelled_questions(data)
    assert len(questions) == 2
    given = [Example(query, "12", rationale="By counting.") for query in questions.values()]
    answered, missing = with_answers(data, given[:1])
    assert (missing, answered.needs_answers) == (1, False)
    assert [(one.answer, one.rationale) for one in answered.knowledge] == [("12", "By counting.")]
