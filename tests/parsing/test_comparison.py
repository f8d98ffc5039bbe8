"""Equality of two answers, by the kind of answer, and word overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from string import ascii_uppercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing import (
    FinalAnswerParser,
    LabelParser,
    Sameness,
    compare_replies,
    same_answer,
    same_choice,
    same_number,
    same_words,
)
from bottega.parsing.comparison import with_options
from bottega.parsing.quantities import asks_text
from bottega.types import Answer, Completion, Query

OPEN = Query("What is it?")
PETS = Query("Which?", choices=("cat", "dog", "hot dog"))
CITY = Query("Which city?\nA) Paris\nB) Rome\n(C) Berlin")

SAME = [
    (OPEN, "B", "I weighed both.\n**ANSWER**: B"),
    (OPEN, "B", "B. Rome"),
    (Query("Which?\nA) Paris \t\nB) Rome  "), "Rome", "B"),
    (OPEN, "5", "five"),
    (OPEN, "Answer: 1,000", "There are many. The answer is 1000.0."),
    (OPEN, r"\boxed{\frac{1}{2}}", "0.5"),
    (OPEN, "1e5", "100000"),
    (OPEN, "1/0", "1/0"),
    (OPEN, "yes", "Yes, it is red."),
    (OPEN, "(Yes) it is red", "yes, bright red"),
    (OPEN, "A red car.", "the red car"),
    (OPEN, "<think>a dog? no</think>cat", "Cat"),
    (OPEN, "cat\nConfidence: 0.9", "cat\nConfidence: 0.2"),
    (OPEN, "!!", "!!"),
    (PETS, "(b) dog", "It is a dog, I am quite sure of that."),
    (PETS, "C", "hot dog"),
    (CITY, "B) Rome", "It has the Forum.\nAnswer: Rome"),
    (CITY, "Paris", "The answer is A."),
]
DIFFERENT = [
    (OPEN, "B", "C"),
    (OPEN, "A", "B. Rome"),
    (OPEN, "5", "6"),
    (OPEN, "1990", "1991"),
    (OPEN, "-5", "5"),
    (OPEN, "Yes, it is there", "No, it is not there"),
    (OPEN, "", ""),
    (OPEN, "<think>I never finished", "cat"),
    (OPEN, "!!", "??"),
    (OPEN, "cat", "dog"),
    (OPEN, "50%", "50"),
    (OPEN, "cat", "yes"),
    (PETS, "cat", "I do not know"),
    (Query("Which?", choices=("red car", "blue car")), "red car", "a green car"),
    (PETS, "hot dog", "dog"),
    (CITY, "A", "Berlin"),
]


@pytest.mark.parametrize(("query", "one", "other"), SAME)
def test_equal_replies_are_the_same(query: Query, one: str, other: str) -> None:
    assert compare_replies(one, other, query) is Sameness.SAME
    assert compare_replies(other, one, query) is Sameness.SAME


@pytest.mark.parametrize(("query", "one", "other"), DIFFERENT)
def test_different_replies_are_not_the_same(query: Query, one: str, other: str) -> None:
    assert compare_replies(one, other, query) is not Sameness.SAME
    assert compare_replies(other, one, query) is not Sameness.SAME


def test_a_list_of_options_needs_more_than_one() -> None:
    sentence = Query("Is this so?\nA. Smith wrote it.")
    assert compare_replies("yes", "A. Smith wrote it", sentence) is not Sameness.SAME
    assert with_options(sentence).choices == ()


def test_options_are_listed_in_the_order_of_their_letters() -> None:
    assert with_options(Query("A) cat\nB) dog\nD) cow")).choices == ("cat", "dog")
    assert with_options(Query("B) dog\nC) cow")).choices == ()
    alphabet = "\n".join(f"{letter}) option {letter}" for letter in ascii_uppercase)
    assert len(with_options(Query(f"{alphabet}\nB) dog")).choices) == 26


PIECES = "a the red cat 5 -1/2 1e9 yes no B (C) \\boxed{ } Answer: <think> 1/0 …"
WORDS = st.lists(st.sampled_from(PIECES.split(" ")), max_size=8).map(" ".join) | st.text(
    max_size=30
)
QUERIES = st.sampled_from([OPEN, PETS, CITY])


@given(one=WORDS, other=WORDS, query=QUERIES)
def test_the_order_of_replies_does_not_matter(one: str, other: str, query: Query) -> None:
    assert compare_replies(one, other, query) is compare_replies(other, one, query)


@given(one=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20), query=QUERIES)
def test_a_reply_is_the_same_as_itself(one: str, query: Query) -> None:
    assert compare_replies(one, one, query) is not Sameness.DIFFERENT


def test_very_long_replies_take_little_time() -> None:
    for long in (
        "1" * 200_000,
        "a " * 100_000,
        "\\frac{" * 30_000,
        "A) x\n" * 30_000,
        "A) x" + " " * 99_999 + "y",
    ):
        compare_replies(long, long[:-1], Query(long))


OPEN_QUERY = Query("How many?")
HALVES = Query("How much?", choices=(r"\frac{1}{2}", "2.5", "5-4-3", "5-3-4"))
LETTERS = Query("Which group?", choices=("O", "A", "B", "AB"))
SPECIES = Query("Which?", choices=("B. subtilis", "E. coli", "A. niger"))
LISTED = Query("Which city?\nA) Paris\nB) Rome")
UNEQUAL = [
    (r"-\sqrt{2}", r"\sqrt{2}"),
    (r"\frac{\pi}{2}", r"\frac{2}{\pi}"),
    ("(3,-4)", "(3,4)"),
    ("[3,4)", "(3,4]"),
    ("y=2x+3", "y=2x-3"),
    ("x>5", "x<5"),
    ("2^3", "3^2"),
    ("5-3i", "5+3i"),
    ("-5 cm", "5 cm"),
    ("-3 °C", "3 °C"),
    ("1.5 kg", "5.1 kg"),
    ("3:2", "2:3"),
    ("2023-01-05", "2023-05-01"),
    ("100 - 5", "5 - 100"),
    ("x-y", "y-x"),
    ("-x", "x"),
    ("B-", "B"),
    ("B+", "B-"),
    ("a-2", "-2"),
]
Evaluator = Callable[[Answer, Answer, Query], Sameness]

CHOICES = [
    (PETS, "cat", "A", 1),
    (PETS, "It is a hot dog, of course it is.", "(C)", 1),
    (PETS, "dog", "hot dog", 0),
    (PETS, "bird", "cat", 0),
    (PETS, "bird", "Bird.", 1),
    (HALVES, "0.5", "A", 1),
    (HALVES, "0.6", "A", 0),
    (HALVES, "5-4-3", "5-3-4", 0),
    (LETTERS, "A", "(B)", 1),
    (LETTERS, "A", "(A)", 0),
    (SPECIES, "A. niger", "(C)", 1),
    (SPECIES, "A. niger", "(A)", 0),
    (LISTED, "B) Rome", "Rome", 1),
    (LISTED, "A", "Rome", 0),
]
NUMBERS = [
    ("1,000", "1000.0", 1),
    ("five", "5", 1),
    ("50%", "50", 0),
    ("50%", "50 percent", 1),
    (r"\frac{1}{2}", "0.5", 1),
    (r"$3\sqrt{2}$", r"\sqrt{18}", 1),
    (r"\sqrt{2}", "1.41", 1),
    (r"\sqrt{2}", "1.42", 0),
    ("5 cm", "5", 1),
    ("0.333", "1/3", 0),
    ("3", "4", 0),
    ("-3", "3", 0),
    ("cat", "cat", 0),
    ("", "", 0),
    ("555-1234", "555-1233", 0),
    ("2-1", "3-2", 0),
    (".5", "0.5", 1),
    (".5", "5", 0),
    ("$.50", "50", 0),
    ("1234567", "1234568", 0),
    ("7" * 60, "7" * 59 + "8", 0),
    ("1234567.0000001", "1234567.0000002", 1),
]
WORD_PAIRS = [
    ("A red car.", "red car", 1),
    ("two cats", "2 cats", 1),
    ("Yes, it is.", "yes", 1),
    ("yes", "no", 0),
    ("red car", "car", 0),
    ("left-hand side", "left hand side", 1),
    ("left-hand side", "side left hand", 0),
    ("The 2 cats!", "two cats", 1),
    ("a 5-year plan", "5 year plan", 1),
    ("1,000 cats", "1000 cats", 1),
    (".50 kg", "0.5kg", 1),
    ("(3, -4)", r"\left(3,-4\right)", 1),
    ("Yes, 5.", "yes", 1),
    (r"\text{cat}", "cat", 1),
    ("unanswerable", "Unanswerable.", 1),
    ("", "", 0),
]


@pytest.mark.parametrize(("query", "one", "other", "same"), CHOICES)
def test_choices_are_compared_by_text_or_letter(
    query: Query, one: str, other: str, same: float
) -> None:
    for evaluate in (same_choice, same_answer):
        assert evaluate(Answer(one), Answer(other), query).score == same
        assert evaluate(Answer(other), Answer(one), query).score == same


@pytest.mark.parametrize(("one", "other", "same"), NUMBERS)
def test_numbers_are_compared_by_value(one: str, other: str, same: float) -> None:
    assert same_number(Answer(one), Answer(other), OPEN_QUERY).score == same
    assert same_number(Answer(other), Answer(one), OPEN_QUERY).score == same


@pytest.mark.parametrize(("one", "other", "same"), WORD_PAIRS)
def test_short_answers_are_compared_by_words(one: str, other: str, same: float) -> None:
    assert same_words(Answer(one), Answer(other), OPEN_QUERY).score == same
    assert same_words(Answer(other), Answer(one), OPEN_QUERY).score == same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [one for one in (*NUMBERS, *WORD_PAIRS) if one[0] != "cat"]
    + [("5", "red", 0), ("cat", "cat", 1)],
)
def test_open_answers_are_numbers_or_words(one: str, other: str, same: float) -> None:
    assert same_answer(Answer(one), Answer(other), OPEN_QUERY).score == same


def test_parsed_answers_are_compared_by_labels() -> None:
    two = Answer("cat, dog", labels=("cat", "dog"))
    reversed_two = Answer("dog, cat", labels=("dog", "cat"))
    none = LabelParser(multi_label=True)(PETS, Completion("none"))
    for query in (PETS, OPEN_QUERY):
        assert same_answer(two, reversed_two, query) is Sameness.SAME
        assert same_answer(two, Answer("cat", labels=("cat",)), query) is Sameness.DIFFERENT
    assert same_answer(none, none, PETS) is Sameness.SAME
    assert same_answer(none, two, PETS) is Sameness.DIFFERENT
    parsed = FinalAnswerParser()(HALVES, Completion("It is 0.5, so the answer is 0.5."))
    half = Answer(HALVES.choices[0], labels=HALVES.choices[:1])
    assert same_answer(parsed, half, HALVES) is Sameness.SAME


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_order_and_signs_matter_in_numbers_and_formulas(one: str, other: str) -> None:
    for evaluate in (same_words, same_answer):
        assert evaluate(Answer(one), Answer(other), OPEN_QUERY).score == 0
        assert evaluate(Answer(other), Answer(one), OPEN_QUERY).score == 0
        assert evaluate(Answer(one), Answer(f" {one}."), OPEN_QUERY).score == 1


@pytest.mark.parametrize("evaluate", [same_answer, same_choice, same_number, same_words])
def test_an_invalid_answer_equals_nothing(evaluate: Evaluator) -> None:
    five = Answer("5", labels=("5",))
    invalid = replace(five, valid=False)
    query = Query("How many?", choices=("5", "6"))
    assert evaluate(five, five, query) is Sameness.SAME
    for one, other in ((five, invalid), (invalid, five), (invalid, invalid)):
        assert evaluate(one, other, query).score == evaluate(one, other, OPEN_QUERY).score == 0


@given(
    one=st.text(max_size=30),
    other=st.text(max_size=30),
    query=st.sampled_from([OPEN_QUERY, PETS, HALVES, LISTED]),
)
def test_comparison_is_symmetric(one: str, other: str, query: Query) -> None:
    for evaluate in (same_answer, same_choice, same_number, same_words):
        found = evaluate(Answer(one), Answer(other), query)
        assert found is evaluate(Answer(other), Answer(one), query)


@pytest.mark.parametrize(
    ("reply", "same"),
    [
        *((reply, 1) for reply in ("A and B", "(A), (B)", "B; A", "dog, cat", "cat and dog")),
        *((reply, 0) for reply in ("A and C", "A and 7", "A", "A, B and C")),
    ],
)
def test_lists_of_options_are_compared_by_text_or_letter(reply: str, same: float) -> None:
    two = Answer("cat, dog", labels=("cat", "dog"))
    for evaluate in (same_choice, same_answer):
        assert evaluate(two, Answer(reply), PETS).score == same
        assert evaluate(Answer(reply), two, PETS).score == same


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the part number?", True),
        ("Which gate?", True),
        ("What does the sign say?", True),
        ("Read the form as JSON. zip", True),
        ("Answer in JSON. part", True),
        ("What number is on the shirt?", True),
        ("What is the total of the invoice?", False),
        ("What is on the card?", False),
        ("How many rooms?", False),
        ("How long is it?", False),
        ("", False),
    ],
)
def test_identifiers_and_wordings_are_compared_by_spelling(question: str, expected: bool) -> None:
    assert asks_text(question) is expected
