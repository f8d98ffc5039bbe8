from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.routing import BenefitGate
from tests.routing.builders import near

Gains = Callable[[int], tuple[float, float, float]]  # by the third of the similarities
MIDDLES = [near(third) for third in (1 / 6, 3 / 6, 5 / 6)]


def pair(draw: random.Random, gain: float) -> tuple[float, float]:
    """Right or wrong with demonstrations and without; the two differ in 30 % of the queries."""
    place = draw.random()
    if place < 0.3:
        won = float(place < (0.3 + gain) / 2)
        return won, 1 - won
    same = float(draw.random() < 0.6)
    return same, same


def simulated(gate: BenefitGate, gains: Gains, n: int, seed: int) -> list[tuple[bool, ...]]:
    """Return the shown thirds after each of n samples."""
    draw = random.Random(seed)
    shown = []
    for i in range(n):
        similarity = draw.random()
        gate.learn(near(similarity), *pair(draw, gains(i)[int(similarity * 3)]))
        shown.append(tuple(map(gate.shows, MIDDLES)))
    return shown


def ends_as(wanted: tuple[bool, ...], gains: Gains, n: int, *, unmeasured: str = "hidden") -> float:
    """The share of 60 streams of n samples after which this is shown."""
    return mean(
        simulated(BenefitGate(unmeasured=unmeasured), gains, n, seed)[-1] == wanted
        for seed in range(60)
    )


ALL, NONE = (True,) * 3, (False,) * 3
HELP: Gains = lambda i: (0.25,) * 3  # noqa: E731
HURT: Gains = lambda i: (-0.25,) * 3  # noqa: E731
NEITHER: Gains = lambda i: (0.0,) * 3  # noqa: E731


def switches(shown: list[tuple[bool, ...]]) -> int:
    return sum(a != b for before, now in pairwise(shown) for a, b in zip(before, now, strict=True))


def test_helping_demonstrations_are_shown_within_150_samples() -> None:
    assert ends_as(ALL, HELP, 150) >= 0.95


def test_shown_demonstrations_that_hurt_are_hidden_within_100_samples() -> None:
    assert ends_as(NONE, HURT, 100, unmeasured="shown") >= 0.95


def test_hurting_demonstrations_are_never_shown() -> None:
    for seed in range(10):
        shown = simulated(BenefitGate(), HURT, 300, seed)
        assert not any(map(any, shown))


@pytest.mark.slow
def test_a_decline_hides_demonstrations_within_200_samples() -> None:
    def turning(i: int) -> tuple[float, float, float]:
        return HELP(i) if i < 300 else HURT(i)

    assert ends_as(NONE, turning, 500) >= 0.95


def test_each_band_is_decided_separately() -> None:
    gates = [BenefitGate() for _ in range(30)]
    ends = [
        simulated(gate, lambda i: (-0.3, 0.0, 0.3), 240, seed)[-1]
        for seed, gate in enumerate(gates)
    ]
    assert mean(not end[0] and end[2] for end in ends) >= 0.95
    low, middle, high = gates[0].summary()
    assert low.gain.high < 0 < high.gain.low
    assert (low.low, high.high) == (-math.inf, math.inf)
    assert low.high == middle.low and 0.2 < middle.low < 0.45 < 0.55 < middle.high < 0.8


@pytest.mark.slow
def test_harmless_demonstrations_do_not_flap() -> None:
    changes = [switches(simulated(BenefitGate(), NEITHER, 1500, seed)) for seed in range(8)]
    assert mean(changes) <= 6  # in three bands
    assert max(changes) <= 14


def test_helping_demonstrations_stay_shown() -> None:
    shown = [simulated(BenefitGate(), HELP, 1000, seed)[200:] for seed in range(5)]
    assert mean(mean(map(mean, stream)) for stream in shown) > 0.98


@pytest.mark.parametrize("unmeasured", ["hidden", "shown"])
def test_the_setting_decides_before_enough_samples(unmeasured: str) -> None:
    gate = BenefitGate(unmeasured=unmeasured, min_samples=5)
    for _ in range(4):
        assert gate.shows(near(0.5)) == (unmeasured == "shown")
        gate.learn(near(0.5), 1.0, 0.0)
    gate.learn(near(0.5), 1.0, 0.0)
    assert gate.shows(near(0.5))


def test_no_candidates_means_no_decision_and_no_sample() -> None:
    gate = BenefitGate(unmeasured="shown")
    assert not gate.shows([])
    gate.learn([], 1.0, 0.0)
    assert gate.summary()[0].n == 0


def test_a_constant_similarity_gives_one_band() -> None:
    gate = BenefitGate()
    for _ in range(100):
        gate.learn(near(1.0), 1.0, 0.0)
    assert gate.shows(near(1.0))
    assert sorted(band.n for band in gate.summary()) == [0, 0, 100]


def test_a_gain_must_exceed_min_gain() -> None:
    for least, shown in ((0.0, True), (0.3, False)):
        gate = BenefitGate(min_gain=least)
        simulated(gate, lambda i: (0.2,) * 3, 240, seed=1)
        assert gate.shows(near(0.5)) == shown


SCORES = st.floats(0, 1)
SAMPLES = st.lists(st.tuples(st.floats(-1e6, 1e6), SCORES, SCORES), max_size=120)


@given(samples=SAMPLES, bands=st.integers(1, 4), least=st.integers(1, 15))
def test_a_restored_gate_continues_identically(
    samples: list[tuple[float, float, float]], bands: int, least: int
) -> None:
    settings: Mapping[str, int] = {"bands": bands, "min_samples": least, "window": 60}
    gate, copy = BenefitGate(**settings), BenefitGate(**settings)  # type: ignore[arg-type]
    for place, (similarity, *scores) in enumerate(samples):
        gate.learn(near(similarity), *scores)
        if place == len(samples) // 2:
            copy.restore(json.loads(json.dumps(gate.state())))
        elif place > len(samples) // 2:
            copy.learn(near(similarity), *scores)
    assert samples == [] or copy.state() == gate.state()
    assert sum(band.n for band in gate.summary()) == min(60, len(samples))
    for band in gate.summary():
        assert -1 <= band.gain.low <= band.gain.value <= band.gain.high <= 1
        assert band.n >= least or not band.shown or len(samples) >= least


WHOLE = BenefitGate().state()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {**WHOLE, "format": 2},
        {**WHOLE, "samples": [[1, 2]]},
        {**WHOLE, "edges": [1.0]},
        {**WHOLE, "edges": [2.0, 1.0], "open": [True] * 3},
        {**WHOLE, "open": []},
        {**WHOLE, "open": ["yes"]},
        {**WHOLE, "edges": [1.0, 2.0, 3.0], "open": [True] * 4},  # more bands than it has
    ],
)
def test_a_damaged_state_is_rejected_and_changes_nothing(state: dict[str, object]) -> None:
    gate = BenefitGate(min_samples=2)
    for _ in range(9):
        gate.learn(near(0.5), 1.0, 0.0)
    before = gate.state()
    with pytest.raises(SettingError):
        gate.restore(state)
    assert gate.state() == before


@pytest.mark.parametrize(
    "settings", [{"bands": 0}, {"window": 10}, {"unmeasured": "maybe"}, {"confidence": 0.5}]
)
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        BenefitGate(**settings)  # type: ignore[arg-type]


def test_the_smallest_settings_work() -> None:
    gate = BenefitGate(bands=1, min_samples=1, window=1)
    gate.learn(near(0.5), 1.0, 0.0)
    assert BenefitGate(bands=2, min_samples=3, window=6).state()
    with pytest.raises(SettingError, match="must hold"):
        BenefitGate(bands=2, min_samples=3, window=5)
    with pytest.raises(SettingError, match="must hold"):
        BenefitGate(bands=1, min_samples=0, window=5)


@pytest.mark.parametrize("scores", [(1.1, 0.0), (0.0, -0.1), (float("nan"), 0.0)])
def test_scores_must_be_fractions(scores: tuple[float, float]) -> None:
    with pytest.raises(SettingError):
        BenefitGate().learn(near(0.5), *scores)
