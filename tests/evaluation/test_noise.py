from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.evaluation.controls import confused, corrupted
from bottega.types import Example, Query


def examples(labels: list[str], episodes: int = 1) -> list[Example]:
    return [
        Example(Query(str(i)), label, tags={"episode": str(i % episodes)})
        for i, label in enumerate(labels)
    ]


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=40).filter(lambda x: len(set(x)) > 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_the_share_is_exact_and_what_changes_is_wrong(
    labels: list[str], share: float, seed: int
) -> None:
    known = examples(labels)
    noisy = corrupted(known, share, confused(known), seed=seed)
    changed = [(a, b) for a, b in zip(known, noisy, strict=True) if a != b]
    assert len(changed) == round(share * len(known))
    assert all(a.query == b.query and b.answer in labels for a, b in changed)
    assert all(a.answer != b.answer for a, b in changed)
    assert noisy == corrupted(known, share, confused(known), seed=seed)


def test_a_wrong_answer_comes_from_the_same_episode() -> None:
    known = examples(list("axbyaxby"), episodes=2)
    noisy = corrupted(known, 1.0, confused(known), seed=0)
    assert [e.answer for e in noisy] == list("byaxbyax")


def test_several_seeds_choose_different_examples() -> None:
    known = examples(["a", "b"] * 20)
    wrong = confused(known)
    assert corrupted(known, 0.5, wrong, seed=0) != corrupted(known, 0.5, wrong, seed=1)


def test_single_labels_stay_lists_of_one() -> None:
    known = [Example(Query("1"), "a", labels=("a",)), Example(Query("2"), "b", labels=("b",))]
    noisy = corrupted(known, 1, confused(known), seed=0)
    assert [(e.answer, e.labels) for e in noisy] == [("b", ("b",)), ("a", ("a",))]


def test_a_wrong_choice_is_one_of_its_question_and_no_rationale_tells_the_right_one() -> None:
    asked = [("Hue?", ("red", "blue")), ("Size?", ("big", "small"))]
    known = [Example(Query(t, choices=c), c[0], rationale=f"Clearly {c[0]}.") for t, c in asked]
    noisy = corrupted(known, 1.0, confused(known), seed=0)
    assert [(e.answer, e.rationale) for e in noisy] == [("blue", None), ("small", None)]


def test_what_cannot_be_corrupted_is_an_error() -> None:
    same = examples(["a", "a"])
    with pytest.raises(SettingError, match="wrongly"):
        corrupted(same, 0.5, confused(same), seed=0)
    passages = [Example(Query("The home of a is b"), ""), Example(Query("The food of a is c"), "")]
    with pytest.raises(SettingError, match="passages"):
        corrupted(passages, 0.5, confused(passages), seed=0)
    several = [Example(Query("?"), "a, b", labels=("a", "b"))]
    with pytest.raises(SettingError, match="one label"):
        corrupted(several, 0.5, confused(several), seed=0)
    with pytest.raises(SettingError, match="label noise is 2"):
        corrupted(examples(["a", "b"]), 2, confused(same), seed=0)
