from __future__ import annotations

import pytest

from bottega.recording import PriceTable, TokenPrice
from bottega.types import Usage

USAGE = Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=200)


def test_published_prices_count_cached_tokens() -> None:
    cost = PriceTable()("gpt-4o", USAGE)
    whole = PriceTable()("gpt-4o", Usage(1000, 100))
    assert cost is not None and whole is not None
    assert 0 < cost < whole


@pytest.mark.parametrize("model", ["", "nobody-knows-this", "scripted"])
def test_an_unknown_price_is_none(model: str) -> None:
    assert PriceTable()(model, USAGE) is None


@pytest.mark.parametrize("model", ["local:Qwen/Qwen2.5-VL-7B-Instruct", "bundled:apprentice"])
def test_models_in_this_process_are_free(model: str) -> None:
    assert PriceTable()(model, USAGE) == 0.0


def test_overrides_go_by_name_then_by_the_longest_prefix() -> None:
    prices = PriceTable(
        {
            "gpt-4o": TokenPrice(1, 2),
            "gpt-*": TokenPrice(3, 3),
            "gpt-4*": TokenPrice(4, 4, cached=0),
            "local:big": TokenPrice(5, 5),
        }
    )
    assert prices("gpt-4o", USAGE) == pytest.approx((1000 * 1 + 100 * 2) / 1e6)
    assert prices("gpt-4-mini", USAGE) == pytest.approx((800 * 4 + 100 * 4) / 1e6)
    assert prices("gpt-9", USAGE) == pytest.approx(1100 * 3 / 1e6)
    assert prices("local:big", USAGE) == pytest.approx(1100 * 5 / 1e6)
