from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing import FinalAnswerParser
from bottega.types import Answer, Completion, Query

ROOTS = Query("?", choices=(r"$\frac{1}{2}$", "2.5", "A square", "$6$", "3"))
BARE = Query("?", choices=("A", "B", "C", "D", "E"))
OPEN = Query("?")
parse = FinalAnswerParser()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("(B)", "2.5"),
        ("b", "2.5"),
        (r"So \boxed{A} is wrong and \boxed{\text{E}} is right, as B.", "3"),
        (r"\boxed{\frac{1}{2}}", r"$\frac{1}{2}$"),
        (r"$\boxed{ 2.5 }$", "2.5"),
        ("The answer is (D).", "$6$"),
        ("The correct answer should be D. It is not A", "$6$"),
        ("**Final Answer:** E", "3"),
        ("Not B.\nAnswer: A\nConfidence: 0.5", r"$\frac{1}{2}$"),
        (r"Answer: B, or rather \boxed{3}", "3"),
        ("(B) 2.5", "2.5"),
        ("B. 2.5", "2.5"),
        ("B\nbecause it is", "2.5"),
        ("Adding up gives 3, which is E.", "3"),
        ("A square", "A square"),
        ("the answer is a square.", "A square"),
        ("0.5", "0.5"),
    ],
)
def test_final_answers_to_a_choice(reply: str, said: str) -> None:
    answer = parse(ROOTS, Completion(reply))
    assert (answer.valid, answer.text, answer.labels) == (True, said, (said,))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("12", "12"),
        ("$12.$", "12"),
        ("2 + 2 = 4, so the answer is 4. Good.", "4"),
        ("The answer is 5.5 cm.", "5.5 cm"),
        (r"\boxed{x = {3}} at last", "x = {3}"),
        (r"\boxed{cut", "cut"),
        ("A", "A"),
    ],
)
def test_open_final_answers(reply: str, said: str) -> None:
    assert parse(OPEN, Completion(reply)).text == said


ANGLES = Query("?", choices=("pi", "2 pi", r"$\frac{1}{3}$", "1,200 m", "3 red balls"))


@pytest.mark.parametrize(
    ("reply", "option"),
    [
        ("(B) 2 pi", 1),
        (r"\boxed{(B) 2\pi}", 1),
        ("The answer is (B) 2.0 pi.", 1),
        ("(B) because the circle turns 2 times", 1),
        ("B\n10 pi is the whole way", 1),
        ("C. 0.33", 2),
        ("(C) 2/6", 2),
        ("(D) 1200", 3),
        ("(E) Three red balls", 4),
    ],
)
def test_letter_with_the_value_of_its_option(reply: str, option: int) -> None:
    assert parse(ANGLES, Completion(reply)).text == ANGLES.choices[option]


@pytest.mark.parametrize(
    "reply",
    [
        "(B) 10 pi",
        "B. 10 pi",
        r"\boxed{(B) 10\pi}",
        "The answer is (B) 10 pi. It is a long way.",
        "(C) 0.3",
        "(C) 2 pi",
        "(C) 2PI/3",
        "(D) 1201",
        "(E) 4 red balls",
    ],
)
def test_letter_with_another_value_is_no_option(reply: str) -> None:
    assert parse(ANGLES, Completion(reply)).text not in ANGLES.choices


@pytest.mark.parametrize("reply", ["", " . ", "<think>B", "Answer:", "Confidence: 1"])
def test_empty_answers_are_invalid(reply: str) -> None:
    assert not parse(BARE, Completion(reply)).valid


def test_confidence_and_rationale_are_kept() -> None:
    reply = "Half of it.\nAnswer: (B)\nConfidence Score: 0.25"
    assert parse(BARE, Completion(reply)) == Answer("B", True, ("B",), 0.25, "Half of it.")


@given(st.text(max_size=80), st.lists(st.text(max_size=8), max_size=30))
def test_no_text_raises_an_error(reply: str, choices: list[str]) -> None:
    answer = parse(Query("?", choices=tuple(choices)), Completion(reply))
    assert answer.labels == ((answer.text,) if answer.valid else ())


@given(st.lists(st.text(max_size=8), min_size=1, max_size=26), st.data())
def test_a_letter_in_brackets_is_its_option(choices: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(choices) - 1))
    query = Query("?", choices=tuple(choices))
    assert parse(query, Completion(f"({chr(ord('A') + place)})")).text == choices[place]
