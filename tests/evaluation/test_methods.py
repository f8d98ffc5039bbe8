from __future__ import annotations

import pytest

from bottega.errors import SettingError
from bottega.evaluation.methods import majority, plan
from bottega.generation import Scripted
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classification
from bottega.types import Candidate, Example, Query
from tests.builders import candidates


@pytest.mark.parametrize(
    ("votes", "label"), [("aab", "a"), ("a", "a"), ("ab", None), ("aabb", None), ("abb", "b")]
)
def test_a_tie_names_no_label(votes: str, label: str | None) -> None:
    assert majority(candidates(*votes)).labels == ((label,) if label else ())


def test_no_candidates_name_no_label() -> None:
    assert majority([]).labels == ()


def test_several_labels_need_more_than_half_of_the_votes() -> None:
    shown = [("a", "b"), ("a",), ("b",), ("a", "c")]
    found = [Candidate(Example(Query("?"), ", ".join(s), labels=s), 1.0) for s in shown]
    assert majority(found, multi_label=True).labels == ("a",)


@pytest.mark.parametrize(
    ("names", "shots"), [(["zero"], [5]), ([], [5]), (["vote"], [0]), (["vote"], [])]
)
def test_wrong_settings_are_named(names: list[str], shots: list[int]) -> None:
    settings = Classification(Scripted(lambda prompt: "a"), ["a"])
    with KnowledgeBase.open(":memory:", embed=None) as knowledge, pytest.raises(SettingError):
        plan(names, shots, knowledge, settings, seed=0)
