from __future__ import annotations

import random
from statistics import mean

import pytest

from bottega.routing.benefit_gate import mean_agreement, paired_gain


@pytest.mark.parametrize(("wins", "losses"), [(0.2, 0.1), (0.05, 0.05), (0.4, 0.1), (0.0, 0.02)])
@pytest.mark.parametrize("n", [20, 80])
def test_one_sided_bounds_have_their_error_rate(wins: float, losses: float, n: int) -> None:
    draw, wrong = random.Random(f"{wins} {losses} {n}"), {"low": 0, "high": 0}
    for _ in range(1000):
        differences = [float((u := draw.random()) < wins) - (u > 1 - losses) for _ in range(n)]
        found = paired_gain(differences, 0.95)
        wrong["low"] += found.low > wins - losses
        wrong["high"] += found.high < wins - losses
    assert max(wrong.values()) / 1000 <= 0.08


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_the_mean_is_inside_its_interval(share: float) -> None:
    draw, inside = random.Random(str(share)), []
    for _ in range(500):
        found = mean_agreement([float(draw.random() < share) for _ in range(30)])
        inside.append(found.low <= share <= found.high)
    assert mean(inside) >= 0.93


def test_no_samples_give_the_widest_interval() -> None:
    assert paired_gain([], 0.98).low < -0.9 and paired_gain([], 0.98).high > 0.9
    assert mean_agreement([]).low < 0.1 and mean_agreement([]).high > 0.9


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_an_interval_is_in_range_and_contains_the_mean(value: float) -> None:
    for values in ([value], [value] * 3, [value, 1.0], [value] * 300):
        found = mean_agreement(values)
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
        assert found.value == pytest.approx(mean(values))
        for sign in (-1, 1):
            change = paired_gain([sign * one for one in values], 0.98)
            assert -1.0 <= change.low <= change.value <= change.high <= 1.0
            assert change.value == pytest.approx(sign * mean(values))
