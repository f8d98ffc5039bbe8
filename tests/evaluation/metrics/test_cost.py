from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.evaluation.metrics.metric import (
    CostQuality,
    average_gap_recovered,
    gap_recovered,
)

SHARES = st.lists(st.floats(0, 1), max_size=12, unique=True)


def recovered(*points: tuple[float, float], weak: float = 0.4, strong: float = 0.8) -> float:
    curve = [CostQuality(share, quality) for share, quality in points]
    return average_gap_recovered(curve, weak=weak, strong=strong)


@given(SHARES)
def test_random_router_recovers_half(shares: list[float]) -> None:
    assert recovered(*((share, 0.4 + 0.4 * share) for share in shares)) == pytest.approx(0.5)


def test_area_examples() -> None:
    assert recovered((0.5, 0.8)) == pytest.approx(0.75)
    assert recovered((0.5, 0.4)) == pytest.approx(0.25)
    assert recovered((0, 0.8), (1, 0.8)) == pytest.approx(1)
    assert recovered((0.2, 0.6), (0.2, 0.8)) == pytest.approx(0.2 * 0.25 + 0.8)


@given(SHARES, st.data())
def test_point_order_does_not_matter(shares: list[float], data: st.DataObject) -> None:
    points = [(share, data.draw(st.floats(0.4, 0.8))) for share in shares]
    area = recovered(*points)
    assert 0 <= area <= 1 + 1e-12
    assert recovered(*data.draw(st.permutations(points))) == pytest.approx(area)


def test_missing_gap_is_an_error() -> None:
    with pytest.raises(SettingError, match="must be above"):
        gap_recovered(0.5, weak=0.6, strong=0.6)
    with pytest.raises(SettingError, match="between 0 and 1"):
        recovered((50, 0.6))


@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_share_outside_0_to_1_is_an_error(share: float) -> None:
    with pytest.raises(SettingError, match="between 0 and 1"):
        recovered((share, 0.6), (0.5, 0.6))


def test_given_end_points_replace_both_models() -> None:
    own = average_gap_recovered(
        [CostQuality(0.0, 0.6), CostQuality(1.0, 0.7)], weak=0.4, strong=0.8
    )
    assert own == pytest.approx((0.5 + 0.75) / 2)
