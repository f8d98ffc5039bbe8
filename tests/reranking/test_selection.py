from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.protocols import Reranker
from bottega.reranking import (
    DemonstrationOrder,
    GatedReranker,
    LabelCoverageReranker,
    MMRReranker,
    TopKReranker,
)
from bottega.reranking.selection import MAX_SHOWN, check_depth
from bottega.types import Candidate, Query
from tests.builders import QUESTION, candidates, example, solid_image

FOUND = candidates("a", "b", "c", "d")
QUERY = Query(QUESTION, (solid_image(50),))


@pytest.mark.parametrize(("order", "shown"), [("nearest-last", "cba"), ("nearest-first", "abc")])
async def test_best_k_in_requested_order(order: DemonstrationOrder, shown: str) -> None:
    chosen = await TopKReranker(order)(QUERY, FOUND, 3)
    assert "".join(c.example.answer for c in chosen) == shown


async def test_shuffled_keeps_the_best_k_and_is_repeatable() -> None:
    many = candidates(*"abcdefghij")
    first = await TopKReranker("shuffled", seed=1)(QUERY, many, 8)
    assert sorted(c.example.answer for c in first) == list("abcdefgh")
    assert first == await TopKReranker("shuffled", seed=1)(QUERY, many, 8)
    assert first != await TopKReranker("shuffled", seed=2)(QUERY, many, 8)


async def test_published_orders_for_text_queries_do_not_change() -> None:
    shown = await TopKReranker("shuffled", seed=1)(Query("3 + 5"), candidates(*"abcdefgh"), 5)
    assert "".join(candidate.example.answer for candidate in shown) == "abced"


async def test_fewer_candidates_than_k() -> None:
    assert len(await TopKReranker()(QUERY, FOUND, 9)) == 4
    assert await TopKReranker()(QUERY, [], 9) == []


@pytest.mark.parametrize(
    "rerank",
    [
        TopKReranker(),
        LabelCoverageReranker(),
        MMRReranker(lambda ids: np.eye(len(ids), dtype=np.float32)),
    ],
)
async def test_a_negative_number_of_candidates_is_refused(rerank: Reranker) -> None:
    with pytest.raises(SettingError) as raised:
        await rerank(QUERY, FOUND, -1)
    assert raised.value.hint
    assert await rerank(QUERY, FOUND, 0) == []


def test_the_depth_of_a_search_is_limited_by_json_nesting() -> None:
    check_depth(0)
    check_depth(MAX_SHOWN)
    with pytest.raises(
        SettingError, match=f"at most {MAX_SHOWN} demonstrations, got {MAX_SHOWN + 1}"
    ):
        check_depth(MAX_SHOWN + 1)


GATE_QUERY = Query("q")


@pytest.mark.parametrize("open", [True, False])
async def test_gate_passes_all_or_no_demonstrations(open: bool) -> None:
    requested: list[Sequence[Candidate]] = []

    def shows(found: Sequence[Candidate]) -> bool:
        requested.append(found)
        return open

    shown = await GatedReranker(TopKReranker(), shows)(GATE_QUERY, candidates("a", "b", "c"), 2)
    assert [c.example.answer for c in shown] == (["b", "a"] if open else [])
    assert requested == [candidates("a", "b", "c")]


async def test_hidden_candidates_are_not_reranked() -> None:
    async def forbid(query: Query, found: Sequence[Candidate], k: int, /) -> list[Candidate]:
        raise AssertionError("re-ranked for nothing")

    assert await GatedReranker(forbid, lambda found: False)(GATE_QUERY, candidates("a"), 1) == []


COVER_QUERY = Query("q")


def found(*labels: str) -> list[Candidate]:
    """Return candidates, best first. Each letter is a label: "ab" has two, "" none."""
    return [
        Candidate(replace(example(each, place), labels=tuple(each)), 1.0 - place / 100)
        for place, each in enumerate(labels)
    ]


async def chosen(*labels: str, k: int) -> list[str]:
    picked = await LabelCoverageReranker("nearest-first")(COVER_QUERY, found(*labels), k)
    return [c.example.answer for c in picked]


async def test_new_labels_precede_nearer_repetitions() -> None:
    assert await chosen("a", "a", "a", "b", "c", k=3) == ["a", "b", "c"]
    assert await chosen("a", "ab", "cd", k=2) == ["ab", "cd"]


async def test_new_round_starts_when_all_labels_are_shown() -> None:
    assert await chosen("a", "a", "b", "a", k=4) == ["a", "b", "a", "a"]


async def test_missing_label_counts_as_a_label() -> None:
    assert await chosen("a", "", "", "b", k=3) == ["a", "", "b"]


async def test_an_example_without_labels_of_its_own_has_its_answer() -> None:
    single = [Candidate(example(label, i), 1.0) for i, label in enumerate(["x", "x", "y"])]
    picked = await LabelCoverageReranker()(COVER_QUERY, single, 2)
    assert [c.example.answer for c in picked] == ["y", "x"]  # nearest last


SETS = st.lists(st.text("abcdef", max_size=3), max_size=12)


@given(labels=SETS, k=st.integers(0, 15))
async def test_k_distinct_candidates_cover_as_much_as_greedy(labels: list[str], k: int) -> None:
    candidates = found(*labels)
    picked = await LabelCoverageReranker("nearest-first")(COVER_QUERY, candidates, k)
    assert len({c.example.id for c in picked}) == len(picked) == min(k, len(candidates))
    everything = set("".join(labels))
    shown = set("".join(c.example.answer for c in picked))
    first = set("".join(c.example.answer for c in candidates[:k]))
    # A greedy cover is within 1 - 1/e of the best choice, of which the nearest k are one.
    assert len(shown) >= 0.63 * len(first)
    assert k < len(everything) + 1 or shown == everything
