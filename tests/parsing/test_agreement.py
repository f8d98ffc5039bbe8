from __future__ import annotations

from string import ascii_uppercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing import agreement
from bottega.parsing.comparison import with_options
from bottega.types import Query

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
    (OPEN, "50%", "50"),
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
    (OPEN, "1e5", "100000"),
    (OPEN, "cat", "yes"),
    (PETS, "cat", "I do not know"),
    (Query("Which?", choices=("red car", "blue car")), "red car", "a green car"),
    (PETS, "hot dog", "dog"),
    (CITY, "A", "Berlin"),
]


@pytest.mark.parametrize(("query", "one", "other"), SAME)
def test_equal_replies_agree(query: Query, one: str, other: str) -> None:
    assert agreement(one, other, query) == agreement(other, one, query) == 1


@pytest.mark.parametrize(("query", "one", "other"), DIFFERENT)
def test_different_replies_do_not_agree(query: Query, one: str, other: str) -> None:
    assert agreement(one, other, query) == agreement(other, one, query) == 0


def test_free_texts_agree_by_word_overlap() -> None:
    one = "A red car is parked in front of the old house."
    assert agreement(one, "A red car stands in front of a house.", OPEN) == 0.75
    assert agreement(one, "Two dogs play on grass.", OPEN) == 0
    assert 0 < agreement("红色的车", "红色车", OPEN) < 1


def test_a_list_of_options_needs_more_than_one() -> None:
    sentence = Query("Is this so?\nA. Smith wrote it.")
    assert agreement("yes", "A. Smith wrote it", sentence) == 0
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
def test_agreement_is_symmetric_and_between_0_and_1(one: str, other: str, query: Query) -> None:
    found = agreement(one, other, query)
    assert 0 <= found <= 1
    assert found == agreement(other, one, query)


@given(one=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20), query=QUERIES)
def test_a_reply_agrees_with_itself(one: str, query: Query) -> None:
    assert agreement(one, one, query) == 1


def test_very_long_replies_take_little_time() -> None:
    for long in (
        "1" * 200_000,
        "a " * 100_000,
        "\\frac{" * 30_000,
        "A) x\n" * 30_000,
        "A) x" + " " * 99_999 + "y",
    ):
        agreement(long, long[:-1], Query(long))
