from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.evaluation.metrics.calibration import (
    CostQuality,
    average_gap_recovered,
    gap_recovered,
    share_needed,
)

SHARES = st.lists(st.floats(0, 1), max_size=12, unique=True)


def recovered(*points: tuple[float, float], weak: float = 0.4, strong: float = 0.8) -> float:
    curve = [CostQuality(share, quality) for share, quality in points]
    return average_gap_recovered(curve, weak=weak, strong=strong)


@given(SHARES)
def test_a_coin_recovers_half(shares: list[float]) -> None:
    assert recovered(*((share, 0.4 + 0.4 * share) for share in shares)) == pytest.approx(0.5)


def test_known_areas() -> None:
    assert recovered((0.5, 0.8)) == pytest.approx(0.75)
    assert recovered((0.5, 0.4)) == pytest.approx(0.25)
    assert recovered((0, 0.8), (1, 0.8)) == pytest.approx(1)
    assert recovered((0.2, 0.6), (0.2, 0.8)) == pytest.approx(0.2 * 0.25 + 0.8)


@given(SHARES, st.data())
def test_the_order_of_the_points_does_not_matter(shares: list[float], data: st.DataObject) -> None:
    points = [(share, data.draw(st.floats(0.4, 0.8))) for share in shares]
    area = recovered(*points)
    assert 0 <= area <= 1 + 1e-12
    assert recovered(*data.draw(st.permutations(points))) == pytest.approx(area)


def test_the_share_that_a_quality_needs() -> None:
    curve = [CostQuality(0.5, 0.7)]
    needed = [share_needed(curve, part, weak=0.4, strong=0.8) for part in (0.0, 0.375, 0.75, 1.0)]
    assert needed == pytest.approx([0, 0.25, 0.5, 1])
    assert share_needed(curve, 1.1, weak=0.4, strong=0.8) is None


def test_without_a_gap_there_is_nothing_to_recover() -> None:
    with pytest.raises(SettingError, match="not above"):
        gap_recovered(0.5, weak=0.6, strong=0.6)
    with pytest.raises(SettingError, match="0 to 1"):
        recovered((50, 0.6))


@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_a_share_of_cost_lies_between_nothing_and_all(share: float) -> None:
    with pytest.raises(SettingError, match="0 to 1"):
        recovered((share, 0.6), (0.5, 0.6))


def test_a_curve_that_begins_and_ends_itself_is_not_extended() -> None:
    curve = [CostQuality(0.0, 0.6), CostQuality(1.0, 0.7)]
    assert share_needed(curve, 0.5, weak=0.4, strong=0.8) == pytest.approx(0)
    assert share_needed(curve, 1.0, weak=0.4, strong=0.8) is None
    three = [CostQuality(0.25, 0.5), CostQuality(0.75, 0.7)]  # 0, 1/4, 3/4 and all of the gap
    needed = [share_needed(three, part, weak=0.4, strong=0.8) for part in (0.125, 0.5, 0.875)]
    assert needed == pytest.approx([0.125, 0.5, 0.875])
