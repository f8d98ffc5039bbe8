from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.evaluation.methods.controls import corrupt, label_confusion
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
def test_noise_changes_the_exact_share_of_answers(
    labels: list[str], share: float, seed: int
) -> None:
    clean = examples(labels)
    noisy = corrupt(clean, share, label_confusion(clean), seed=seed)
    changed = [(a, b) for a, b in zip(clean, noisy, strict=True) if a != b]
    assert len(changed) == round(share * len(clean))
    assert all(a.query == b.query and b.answer in labels for a, b in changed)
    assert all(a.answer != b.answer for a, b in changed)
    assert noisy == corrupt(clean, share, label_confusion(clean), seed=seed)


def test_wrong_answers_come_from_the_same_episode() -> None:
    clean = examples(list("axbyaxby"), episodes=2)
    noisy = corrupt(clean, 1.0, label_confusion(clean), seed=0)
    assert [e.answer for e in noisy] == list("byaxbyax")


def test_seeds_choose_different_examples() -> None:
    clean = examples(["a", "b"] * 20)
    wrong = label_confusion(clean)
    assert corrupt(clean, 0.5, wrong, seed=0) != corrupt(clean, 0.5, wrong, seed=1)


def test_single_labels_stay_lists() -> None:
    clean = [Example(Query("1"), "a", labels=("a",)), Example(Query("2"), "b", labels=("b",))]
    noisy = corrupt(clean, 1, label_confusion(clean), seed=0)
    assert [(e.answer, e.labels) for e in noisy] == [("b", ("b",)), ("a", ("a",))]


def test_corrupted_choice_questions_lose_their_rationale() -> None:
    questions = [("Hue?", ("red", "blue")), ("Size?", ("big", "small"))]
    clean = [Example(Query(t, choices=c), c[0], rationale=f"Clearly {c[0]}.") for t, c in questions]
    noisy = corrupt(clean, 1.0, label_confusion(clean), seed=0)
    assert [(e.answer, e.rationale) for e in noisy] == [("blue", None), ("small", None)]


def test_unsupported_corruption_raises() -> None:
    same = examples(["a", "a"])
    with pytest.raises(SettingError, match="no example can have a wrong answer"):
        corrupt(same, 0.5, label_confusion(same), seed=0)
    passages = [Example(Query("The home of a is b"), ""), Example(Query("The food of a is c"), "")]
    with pytest.raises(SettingError, match="passages"):
        corrupt(passages, 0.5, label_confusion(passages), seed=0)
    multi_label = [Example(Query("?"), "a, b", labels=("a", "b"))]
    with pytest.raises(SettingError, match="one label"):
        corrupt(multi_label, 0.5, label_confusion(multi_label), seed=0)
    with pytest.raises(SettingError, match="label noise must be between 0 and 1, got 2"):
        corrupt(examples(["a", "b"]), 2, label_confusion(same), seed=0)
