from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.prompting import MATH_V, MATH_V_REASONED
from bottega.types import Completion
from tests.builders import solid_image
from tests.paths import SHARED

SAMPLE = SHARED / "data" / "mathvision"


def problem(number: int, **changed: object) -> dict[str, object]:
    return {
        "id": str(number),
        "question": f"Problem {number}: what is next?\n<image1>\n<image2>",
        "options": [],
        "answer": str(number),
        "solution": None,
        "level": 3,
        "subject": "logic",
        "image": f"images/{number}.png",
    } | changed


def published(root: Path) -> Path:
    (root / "images").mkdir()
    (root / "data").mkdir()
    letters = problem(2, options=["A", "B", "C", "D", "E"], answer="E")
    values = problem(3, options=["1", r"$\frac{1}{2}$"], answer="B", solution="Halve it.")
    rows = [problem(1), letters, values, problem(4)]
    for row in rows:
        (root / str(row["image"])).write_bytes(solid_image(int(str(row["id"]))).data)
    for split, part in (("test", rows), ("testmini", rows[:3])):
        text = "\n".join(map(json.dumps, part))
        (root / "data" / f"{split}.jsonl").write_text(text, "utf-8")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return published(tmp_path)


def test_query_set_and_examples_are_disjoint(root: Path) -> None:
    data = load_benchmark(f"mathvision:{root}", seed=0)
    assert sorted(str(e.query.id) for e in data.items) == ["1", "2", "3"]
    [example] = data.knowledge
    assert (example.query.id, example.answer, example.query.images) == ("4", "4", (solid_image(4),))
    assert example.tags == {"subject": "logic", "level": "3"}


def test_replies_are_parsed_and_scored(root: Path) -> None:
    data = load_benchmark(f"mathvision:{root}", seed=0)
    one, letters, values = sorted(data.items, key=lambda item: str(item.query.id))
    assert (letters.answer, values.answer, values.rationale) == ("E", r"$\frac{1}{2}$", "Halve it.")
    for item, reply, score in [
        (one, r"It is \boxed{1.0}.", 1.0),
        (one, "2", 0.0),
        (letters, "(E)", 1.0),
        (letters, "The answer is D.", 0.0),
        (values, "B", 1.0),
        (values, "0.5", 1.0),
        (values, "1", 0.0),
    ]:
        answer = data.parse(item.query, Completion(reply))
        assert data.metrics[0].score(item, answer) == score
    assert data.metrics[0].name == "mathvision_accuracy"
    assert (data.prompt, data.rationale_prompt) == (MATH_V, MATH_V_REASONED)
    reply = r"The answer is \boxed{B}. BECAUSE: Half of it is (A) or B."
    answer = data.parse(values.query, Completion(reply))
    assert (answer.text, answer.rationale) == (values.answer, "Half of it is (A) or B.")


def test_official_scoring_is_an_option(root: Path) -> None:
    data = load_benchmark(f"mathvision:{root},scoring=official", seed=0)
    default = load_benchmark(f"mathvision:{root},scoring=lenient", seed=0)
    assert data.metrics[0].name == "mathvision_accuracy_official"
    assert default.metrics[0].name == "mathvision_accuracy"
    assert (data.knowledge, len(data.items)) == (default.knowledge, 3)
    item = next(item for item in data.items if item.query.id == "3")
    for reply, official, lenient in [("B", 1, 1), ("0.5 cm", 0, 1), ("(B) 10 pi", 0, 0)]:
        completion = Completion(reply)
        assert data.metrics[0].score(item, data.parse(item.query, completion)) == official
        assert default.metrics[0].score(item, default.parse(item.query, completion)) == lenient


def test_unknown_scoring_is_rejected(root: Path) -> None:
    with pytest.raises(SettingError) as error:
        load_benchmark(f"mathvision:{root},scoring=strict", seed=0)
    assert error.value.hint == "use lenient or official"


def sample() -> Benchmark:
    if not SAMPLE.is_dir():
        pytest.skip("needs ../shared/data/mathvision")
    return load_benchmark(f"mathvision:{SAMPLE}", seed=0)


def test_published_layout_is_read() -> None:
    data = sample()
    assert (len(data.items), len(data.knowledge)) == (24, 72)
    ids = [example.query.id for example in (*data.items, *data.knowledge)]
    assert len(set(ids)) == 96
    assert all(example.query.images[0].decode(1).width for example in data.items)


def test_answer_letter_and_text_are_both_correct() -> None:
    data = sample()
    for item in data.items:
        choices = item.query.choices
        letter = [chr(ord("A") + choices.index(item.answer))] if choices else []
        for reply in (item.answer, *letter, rf"Thus \boxed{{{item.answer}}}"):
            answer = data.parse(item.query, Completion(reply))
            assert data.metrics[0].score(item, answer) == 1.0, (item.query.id, reply)
