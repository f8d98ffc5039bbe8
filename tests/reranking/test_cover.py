from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bottega.reranking import LabelCoverageReranker
from bottega.types import Candidate, Query
from tests.builders import example

QUERY = Query("q")


def found(*labels: str) -> list[Candidate]:
    """Best first; each letter is a label, so that "ab" has two and "" has none."""
    return [
        Candidate(replace(example(each, place), labels=tuple(each)), 1.0 - place / 100)
        for place, each in enumerate(labels)
    ]


async def chosen(*labels: str, k: int) -> list[str]:
    picked = await LabelCoverageReranker("nearest-first")(QUERY, found(*labels), k)
    return [c.example.answer for c in picked]


async def test_labels_that_were_not_shown_come_before_nearer_repetitions() -> None:
    assert await chosen("a", "a", "a", "b", "c", k=3) == ["a", "b", "c"]
    assert await chosen("a", "ab", "cd", k=2) == ["ab", "cd"]


async def test_when_all_are_shown_a_new_round_begins() -> None:
    assert await chosen("a", "a", "b", "a", k=4) == ["a", "b", "a", "a"]


async def test_no_class_at_all_is_worth_one_demonstration() -> None:
    assert await chosen("a", "", "", "b", k=3) == ["a", "", "b"]


async def test_an_example_without_labels_of_its_own_has_its_answer() -> None:
    single = [Candidate(example(label, i), 1.0) for i, label in enumerate(["x", "x", "y"])]
    picked = await LabelCoverageReranker()(QUERY, single, 2)
    assert [c.example.answer for c in picked] == ["y", "x"]  # nearest last


SETS = st.lists(st.text("abcdef", max_size=3), max_size=12)


@given(labels=SETS, k=st.integers(0, 15))
async def test_k_different_candidates_that_show_as_much_as_greedy_can(
    labels: list[str], k: int
) -> None:
    candidates = found(*labels)
    picked = await LabelCoverageReranker("nearest-first")(QUERY, candidates, k)
    assert len({c.example.id for c in picked}) == len(picked) == min(k, len(candidates))
    everything = set("".join(labels))
    shown = set("".join(c.example.answer for c in picked))
    first = set("".join(c.example.answer for c in candidates[:k]))
    # A greedy cover is within 1 - 1/e of the best choice, of which the nearest k are one.
    assert len(shown) >= 0.63 * len(first)
    assert k < len(everything) + 1 or shown == everything
