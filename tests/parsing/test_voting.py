from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing.choices import most_confident, most_frequent
from bottega.types import Answer

ANSWERS = st.lists(
    st.builds(
        lambda label, valid, confidence: Answer(
            label, valid=valid, labels=(label,) if valid else (), confidence=confidence
        ),
        st.sampled_from("abc"),
        st.booleans(),
        st.none() | st.floats(0, 1),
    ),
    min_size=1,
    max_size=7,
)


def said(*labels: str) -> list[Answer]:
    return [Answer(label, labels=(label,)) for label in labels]


def test_the_most_frequent_answer_wins_with_its_share_as_confidence() -> None:
    chosen = most_frequent(said("a", "b", "b", "c", "b"))
    assert (chosen.labels, chosen.confidence) == (("b",), 0.6)


def test_invalid_samples_count_against_the_confidence() -> None:
    invalid = Answer("?", valid=False)
    chosen = most_frequent([invalid, *said("a", "b", "a"), invalid])
    assert (chosen.labels, chosen.confidence) == (("a",), 0.4)


def test_the_first_answer_wins_a_tie() -> None:
    assert most_frequent(said("c", "a", "a", "c")).text == "c"


def test_free_answers_are_compared_without_case_and_spacing() -> None:
    assert most_frequent([Answer("Two  dogs"), Answer("a cat"), Answer("two dogs")]).text == (
        "Two  dogs"
    )


@given(ANSWERS)
def test_invalid_samples_never_win_over_valid_ones(answers: list[Answer]) -> None:
    for choose in (most_frequent, most_confident):
        assert choose(answers).valid == any(answer.valid for answer in answers)


@given(ANSWERS)
def test_the_most_confident_valid_answer_is_chosen(answers: list[Answer]) -> None:
    chosen = most_confident(answers)
    rivals = [answer for answer in answers if answer.valid == chosen.valid]
    assert all((chosen.confidence or 0) >= (rival.confidence or 0) for rival in rivals)
