from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.metrics.mathvision import MathVisionAccuracy, equal
from bottega.evaluation.metrics.metric import Judgement
from bottega.parsing import FinalAnswerParser
from bottega.types import Answer, Completion, Example, Query

score = MathVisionAccuracy().score
ROOTS = (r"$\frac{1}{2}$", "$2.5$", r"$\frac{3\sqrt{2}}{2}$", "$5-4-3$", "$5-3-4$")


@given(st.text(alphabet=r"0123456789.+-*/^(){}[], \fracsqtpi$", max_size=200))
def test_arbitrary_text_is_scored_quickly_without_errors(formula: str) -> None:
    started = time.thread_time()
    equal(formula, "1")
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("gold", "reply", "same"),
    [
        ("KNAO", " knao ", True),
        (r"\frac{1}{3}", "0.33", True),
        (r"\frac{1}{3}", "0.34", False),
        ("(2, 3)", r"\left(2,\frac{6}{2}\right)", True),
        ("(2, 3)", "(3, 2)", False),
        ("(2, 3)", "(4/2, 6/2)", True),
        ("(2, 3)", "(2, 4)", False),
        ("(12, 3)", "(22, 3)", False),
        ("(1,)", "(1.0,)", True),
        ("(1, 2)", "(1, 2,)", False),
        ("(2, 3)", "[2, 3]", False),
        ("(2, 3)", "(2, 3, 4)", False),
        ("(a, 3)", "(A, 3.0)", True),
        ("((1, 2), 3)", "((1, 2), 6/2)", True),
        ("(f(1, 2), [3, 4], 5)", "(f(1, 2), [3, 4], 5.0)", True),
        ("(f(1, 2), 3)", "(f(1), 2, 3)", False),
        ("5/2", "2.50", True),
        ("2.504", "2.5", True),
        ("2.506", "2.5", False),
        ("", "", False),
        ("4", "", False),
        ("$", "$", False),
    ],
)
def test_answer_equality(gold: str, reply: str, same: bool) -> None:
    assert equal(gold, reply) == equal(reply, gold) == same


@pytest.mark.parametrize(
    ("gold", "reply", "right"),
    [
        (0, "A", True),
        (0, "(A)", True),
        (0, r"\boxed{A}", True),
        (0, "the answer is 0.5.", True),
        (0, r"\boxed{x=\frac{2}{4}}", True),
        (0, "B", False),
        (0, "0.6", False),
        (2, "2.12", True),
        (1, r"\boxed{2.5 \text{ cm}}", True),
        # As sums both are -2: only the texts differ.
        (3, "5-4-3", True),
        (4, "5-4-3", False),
        (4, "-2", False),
        (0, "", False),
    ],
)
def test_option_parsing(gold: int, reply: str, right: bool) -> None:
    item = Example(Query("?", choices=ROOTS), ROOTS[gold])
    assert score(item, FinalAnswerParser()(item.query, Completion(reply))) == float(right)


def test_unparsed_option_letter_is_correct() -> None:
    item = Example(Query("?", choices=ROOTS), ROOTS[1])
    assert [score(item, Answer(reply)) for reply in ("b", "c", "2.50")] == [1.0, 0.0, 1.0]
    assert score(item, Answer("b", valid=False)) == 0.0


def test_open_answer_parsing() -> None:
    item = Example(Query("?"), r"$\frac{2}{21}$")
    assert [score(item, Answer(reply)) for reply in (r"\frac{2}{21}", "2/21", "0.1", "2")] == [
        1,
        1,
        1,
        0,
    ]


def test_estimate_is_the_mean_score() -> None:
    judged = [Judgement(Example(Query("?"), "2"), Answer("2"), score) for score in (1.0, 1.0, 0.0)]
    found = MathVisionAccuracy().estimate(judged, seed=0)
    assert found.value == pytest.approx(2 / 3)
    assert found.low is not None and found.high is not None
    assert found.low < found.value < found.high
