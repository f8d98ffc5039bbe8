from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing import ChoiceParser, FinalAnswerParser, RationaleParser
from bottega.types import Completion, Query

CITIES = Query("Which?", choices=("Rome", "Paris", "New York"))
OPEN = Query("How many?")
MARKS = ("BECAUSE:", "**FINAL ANSWER:**", "THOUGHT PROCESS:", "The answer is", "A", "(B)", ".")
letters = RationaleParser(ChoiceParser(whole_words=True))
parse = RationaleParser(FinalAnswerParser())


@pytest.mark.parametrize(
    ("reply", "said", "why"),
    [
        ("The answer is B. BECAUSE: A river, (C) is far.", "Paris", "A river, (C) is far."),
        ("The answer is B.\nBECAUSE: it is", "Paris", "it is"),
        ("The answer is (B). **BECAUSE:** it is", "Paris", "it is"),
        ("The answer is B. Because: it is", "Paris", "it is"),
        ("```\nThe answer is B. BECAUSE: it is\n```", "Paris", "it is"),
        (
            "**THOUGHT PROCESS:** A is out.\n**FINAL ANSWER:** The answer is B. BECAUSE: C is out.",
            "Paris",
            "A is out.\nC is out.",
        ),
        ("**THOUGHT PROCESS:** A or C?\n**FINAL ANSWER:** The answer is B.", "Paris", "A or C?"),
        ("THOUGHT PROCESS: (A)? No.\nThe answer is B.", "Paris", "(A)? No."),
        ("First (A), but no. The answer is B. BECAUSE: x", "Paris", "First (A), but no.\nx"),
        ("Final Answer: A\nNo.\nFinal Answer: B", "Paris", "Final Answer: A\nNo."),
        ("The answer is Paris. BECAUSE: Rome is not.", "Paris", "Rome is not."),
        ("B. BECAUSE: it is", "Paris", "it is"),
        ("The answer is B. Rome is older.\nBECAUSE: it is", "Paris", "it is"),
        ("<think>A BECAUSE: no</think>The answer is B. BECAUSE: it is", "Paris", "it is"),
    ],
)
def test_reasons_become_the_rationale(reply: str, said: str, why: str) -> None:
    answer = letters(CITIES, Completion(reply))
    assert (answer.valid, answer.text, answer.labels) == (True, said, (said,))
    assert answer.rationale == why


@pytest.mark.parametrize(
    ("reply", "said", "why"),
    [
        (r"The answer is \boxed{12}. BECAUSE: \boxed{3} by four", "12", r"\boxed{3} by four"),
        ("The answer is //boxed{12}. BECAUSE: 3 by 4", "12", "3 by 4"),
        ("Three rows. The answer is 12. BECAUSE: 3 by 4", "12", "Three rows.\n3 by 4"),
        ("12", "12", None),
        ("So the answer is 12.", "12", None),
        ("3 by 4\nAnswer: 12", "12", "3 by 4"),
    ],
)
def test_open_answers(reply: str, said: str, why: str | None) -> None:
    answer = parse(OPEN, Completion(reply))
    assert (answer.text, answer.rationale) == (said, why)


def test_a_box_around_the_letter_is_the_option() -> None:
    assert parse(CITIES, Completion(r"The answer is \boxed{B}. BECAUSE: A")).text == "Paris"


@pytest.mark.parametrize("reply", ["", "The answer is D. BECAUSE: (A)"])
def test_reasons_alone_are_invalid(reply: str) -> None:
    assert not letters(CITIES, Completion(reply)).valid


@given(st.text() | st.lists(st.sampled_from(MARKS)).map(" ".join))
def test_no_text_raises(reply: str) -> None:
    letters(CITIES, Completion(reply))
    parse(OPEN, Completion(reply))


@pytest.mark.parametrize("odd", ["*", "\n", "```", "BECAUSE:", "BECAUSE ", "the answer is ", " "])
def test_repetitive_replies_take_little_time(odd: str) -> None:
    started = time.process_time()
    parse(OPEN, Completion(odd * 20_000))
    assert time.process_time() - started < 2
