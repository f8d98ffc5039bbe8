"""Tests of MathVision's published scoring: each rule, and agreement with published verdicts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.metrics.mathvision import (
    MathVisionAccuracy,
    OfficialMathVisionAccuracy,
    OfficialMathVisionParser,
    official_equal,
    official_value,
    read_answer,
)
from bottega.evaluation.metrics.metric import Judgement
from bottega.parsing import FinalAnswerParser, RationaleParser
from bottega.types import Answer, Completion, Example, Query
from tests.paths import SHARED

DEFAULT = RationaleParser(FinalAnswerParser())
parse = OfficialMathVisionParser(DEFAULT)
score = OfficialMathVisionAccuracy().score
# `test.jsonl` and files of `outputs/` of MathVision's repository.
OUTPUTS = SHARED / "data" / "mathvision-outputs"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        # A letter in the first line or at the end of the last sentence.
        ("D\nThe square is larger.", "d"),
        ("(D)\nThe square is larger.", "d"),
        ("(D) D\nThe square is larger.", "d"),
        ("The square is larger, so choose D.", "d"),
        ("The square is larger, so choose (D).", "d"),
        ("E\nbut it could be B.", "b"),
        ("F\nof 3", "fof3"),
        # A number after the last "is".
        ("It is 4, no: it is 7.5.", "7.5"),
        ("The box is \\boxed{3}. The sum is 12.", "12"),
        # The last box, up to the last brace.
        (r"\boxed{3}, or \boxed{ 5 }", "5"),
        (r"\boxed{3}} and {x}", "3"),
        (r"\boxed{\frac{1}{2}} of {all}", r"\frac{1}{2}}of{all"),
        (r"the answer is 4, or $\boxed{6}$", "6"),
        (r"\boxed{7", r"\boxed{7"),
        # The sentence after a phrase.
        ("Add them. The answer is 8 cm. Good.", "8cm"),
        ("Hence the correct answer is (C) 9\nas 3 x 3", "c9"),
        ("The answer should be 6, as the answer is 5 + 1", "5+1"),
        ("The answer is: 5 cm", "5cm"),
        ("Two halves", "twohalves"),
        (r"\boxed{{}7{}}", "7"),
        # The right side of the last equals sign.
        (r"\boxed{x = y = 5}", "5"),
        (r"\boxed{\pi \approx 3.14}", "3.14"),
        # Letters in brackets or braces.
        (r"\boxed{(B)}", "b"),
        (r"\boxed{\text{(B)}}", "b"),
        (r"\boxed{\text{B}}", "b"),
        (r"\boxed{(B) 10\pi}", r"b10\pi"),
        # Notation.
        (r"\boxed{\left( 2, 3 \right)}", "(2,3)"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{\$ 5.}", "5"),
        (r"\boxed{30^\circ}", "30"),
        (r"\boxed{30^{\circ}}", "30"),
        (r"\boxed{2 \text{ km}}", "2"),
        (r"\boxed{2 \text{ units}}", "2"),
        (r"\boxed{2 \text{ m}^3}", "2"),
        (r"\boxed{2 \text{ cm}}", "2{cm}"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{+∞}", r"\infty"),
        (r"\boxed{\frac12}", r"\frac12"),
        (r"\boxed{\frac12\sqrt3}", r"\frac{1}{2}\sqrt{3}"),
        (r"\boxed{\frac1{\sqrt3}}", r"\frac{1}{\sqrt{3}}"),
        ("", ""),
    ],
)
def test_answer_reading(reply: str, answer: str) -> None:
    assert read_answer(reply) == answer


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("12", 12),
        (".5", 0.5),
        ("1,200", 1200),
        ("1,200.5", 1200.5),
        ("1,20", None),
        ("$7$", 7),
        (r"\displaystyle \frac{1}{4}", 0.25),
        (r"\dfrac{2}{3}", 0.67),
        (r"\tfrac{2}{3}", 0.67),
        (r"\left(2\right)\quad", 2),
        (r"\frac12", None),
        (r"\frac{1}{0}", None),
        (r"4\frac{1}{2}", 2),
        (r"2\sqrt{3}", 3.46),
        (r"\sqrt[3]{8}", 2),
        (r"\sqrt2", None),
        (r"\sqrt{-1}", None),
        (r"\frac{\sqrt{3}-1}{2}", 0.37),
        (r"10\pi", 31.42),
        (r"4/2\pi", 0.64),
        (r"6\div3\times2", 4),
        (r"2\cdot3*4", 24),
        ("5:4", 1.25),
        ("1 200", 200),
        ("(1+2)(3+4)", 21),
        ("[2]3", 6),
        (r"\{3\}", 3),
        ("--3", 3),
        ("-2^2", -4),
        ("2^{-1}", 0.5),
        ("2^-1", None),
        ("2^3^2", 64),
        ("2^{9999}", None),
        ("3!", 6),
        ("2.5!", None),
        ("171!", None),
        ("12'", 12),
        (r"50\%", 0.5),
        # No value for units and names.
        ("10cm", None),
        ("10{cm}", None),
        ("x", None),
        ("2e", None),
        ("10 pi", None),
        ("30°", None),
        (r"50 \%", None),
        ("3;4", None),
        ("10-", None),
        ("(24", None),
        ("", None),
        # The text from a closing bracket, "_" or the end of a sentence on is ignored.
        ("24)cm", 24),
        (r"\frac{1}{2}}of{all", 0.5),
        ("24_{cm}", 24),
        ("5.so it is", 5),
        (r"3\to4", 3),
    ],
)
def test_formula_value(formula: str, value: float | None) -> None:
    assert official_value(formula) == value


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("KNAO", "knao", True),
        ("KNAO", "knoa", False),
        ("5", "5.00", True),
        (r"\frac{1}{3}", "0.33", True),
        (r"\frac{1}{3}", "0.34", False),
        ("5", "5cm", False),
        ("5cm", "5cm", True),
        ("(2,3)", r"(2,\frac{9}{3})", True),
        ("(2,3)", "(3,2)", False),
        ("(2,3)", "[2,3]", False),
        ("(2,3)", "(2,3,4)", False),
        ("(2,x)", "(2,x)", True),
        ("(2,x)", "(2.0,x)", False),
        ("(a,1)", "(a,1.0)", True),
        ("[-a,1]", "[-a,1.0]", True),
        (r"(-\infty,2)", r"(-\infty,2.0)", True),
        ("x", "y", False),
        ("", "", False),
        (" ", "5", False),
    ],
)
def test_equality(gold: str, answer: str, same: bool) -> None:
    assert official_equal(gold, answer) == official_equal(answer, gold) == same


OPTIONS = (r"$\frac{1}{2}$", "$2\\pi$", "3 cm", "4", "five")


@pytest.mark.parametrize(
    ("gold", "reply", "right", "right_by_default"),
    [
        (1, r"\boxed{B}", True, True),
        (1, r"\boxed{2\pi}", True, True),
        (1, "6.28", True, True),
        (0, "The answer is 0.5.", True, True),
        (4, "five", True, True),
        (1, r"\boxed{C}", False, False),
        (1, "(B) 10 pi", False, False),
        (1, "The answer is (B) 10 pi.", False, False),
        # The default accepts a letter before its option's text, units and more notations.
        (3, r"\boxed{(D) 4}", False, True),
        (3, r"\boxed{4 \text{ cm}}", False, True),
        (0, r"\boxed{\frac12}", False, True),
    ],
)
def test_official_and_default_verdicts(
    gold: int, reply: str, right: bool, right_by_default: bool
) -> None:
    item = Example(Query("?", choices=OPTIONS), OPTIONS[gold])
    completion = Completion(reply)
    assert score(item, parse(item.query, completion)) == right
    default = MathVisionAccuracy().score(item, DEFAULT(item.query, completion))
    assert default == right_by_default


def test_letters_are_wrong_for_open_questions() -> None:
    item = Example(Query("?"), "4")
    replies = ("A", "4", r"\boxed{4.001}", "4 cm")
    assert [score(item, parse(item.query, Completion(reply))) for reply in replies] == [0, 1, 1, 0]


def test_answer_keeps_rationale_and_confidence() -> None:
    reply = "<think>B or C?</think>The answer is (C). BECAUSE: the others are odd."
    answer = parse(Query("?", choices=OPTIONS), Completion(reply, logprob=0.0))
    assert (answer.text, answer.labels, answer.valid) == ("c", ("c",), True)
    assert (answer.rationale, answer.confidence) == ("the others are odd.", 1.0)


@pytest.mark.parametrize("reply", ["", " \n", "<think>B", "."])
def test_empty_replies_are_invalid_and_wrong(reply: str) -> None:
    item = Example(Query("?", choices=OPTIONS), OPTIONS[1])
    answer = parse(item.query, Completion(reply))
    assert (answer.valid, answer.labels, score(item, answer)) == (False, (), 0.0)


@given(st.text(alphabet=r"0123456789.,+-*/^!(){}[]\ fracsqtpiboxed=$'_", max_size=300))
def test_arbitrary_text_is_scored_quickly_without_errors(reply: str) -> None:
    started = time.thread_time()
    official_equal("1", read_answer(reply))
    official_equal(reply, "1")
    assert time.thread_time() - started < 1


@pytest.mark.parametrize("part", ["(", "1+", "2^", "{", r"\frac{", "-", "1,000", "9", "3!"])
def test_long_formulas_are_scored_quickly_without_errors(part: str) -> None:
    started = time.thread_time()
    official_value(part * 20_000)
    assert time.thread_time() - started < 2


def test_estimate_is_the_mean_score() -> None:
    judged = [Judgement(Example(Query("?"), "2"), Answer("2"), score) for score in (1.0, 0.0)]
    assert OfficialMathVisionAccuracy().estimate(judged, seed=0).value == 0.5


def published_outputs() -> list[Path]:
    return sorted(path for path in OUTPUTS.glob("*.jsonl") if path.name != "test.jsonl")


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.skipif(not published_outputs(), reason="needs ../shared/data/mathvision-outputs")
def test_verdicts_agree_with_published_outputs() -> None:
    items = {row["id"]: example(row) for row in read_lines(OUTPUTS / "test.jsonl")}
    for path in published_outputs():
        rows = read_lines(path)
        agreed = 0
        for row in rows:
            item = items[row["id"]]
            answer = parse(item.query, Completion(str(row["response"] or "")))
            agreed += score(item, answer) == float(bool(row["correct"]))
        assert agreed / len(rows) >= 0.999, path.name


def example(row: dict[str, object]) -> Example:
    options, answer = row["options"], str(row["answer"])
    assert isinstance(options, list)
    gold = options[ord(answer) - ord("A")] if options else answer
    return Example(Query("?", choices=tuple(options), id=str(row["id"])), gold)
