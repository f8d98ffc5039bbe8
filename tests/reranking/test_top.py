from __future__ import annotations

import numpy as np
import pytest

from bottega.errors import SettingError
from bottega.protocols import Reranker
from bottega.reranking import DemonstrationOrder, LabelCoverageReranker, MMRReranker, TopKReranker
from bottega.reranking.selection import MOST_SHOWN, check_depth
from bottega.types import Query
from tests.builders import QUESTION, candidates, solid_image

FOUND = candidates("a", "b", "c", "d")
QUERY = Query(QUESTION, (solid_image(50),))


@pytest.mark.parametrize(("order", "shown"), [("nearest-last", "cba"), ("nearest-first", "abc")])
async def test_the_best_k_in_the_order_asked_for(order: DemonstrationOrder, shown: str) -> None:
    chosen = await TopKReranker(order)(QUERY, FOUND, 3)
    assert "".join(c.example.answer for c in chosen) == shown


async def test_shuffled_keeps_the_best_k_and_is_repeatable() -> None:
    many = candidates(*"abcdefghij")
    first = await TopKReranker("shuffled", seed=1)(QUERY, many, 8)
    assert sorted(c.example.answer for c in first) == list("abcdefgh")
    assert first == await TopKReranker("shuffled", seed=1)(QUERY, many, 8)
    assert first != await TopKReranker("shuffled", seed=2)(QUERY, many, 8)


async def test_fewer_candidates_than_asked_for() -> None:
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
    check_depth(MOST_SHOWN)
    with pytest.raises(
        SettingError, match=f"at most {MOST_SHOWN} demonstrations, got {MOST_SHOWN + 1}"
    ):
        check_depth(MOST_SHOWN + 1)
