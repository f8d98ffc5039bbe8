from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bottega.errors import ServerFailedError, SettingError
from bottega.routing import AgreementPair, BenefitGate, ShadowSampler
from bottega.routing.benefit_gate import MAX_EAGER, AnswerCall
from bottega.types import Query
from tests.routing.builders import QUERY, near


def same(one: str, other: str, query: Query) -> float | None:
    return None if "?" in (one, other) else float(one == other)


def shadow(rate: float = 1.0, at_once: int = 2, seed: int = 0) -> ShadowSampler:
    return ShadowSampler(BenefitGate(min_samples=5), same, rate=rate, at_once=at_once, seed=seed)


def says(text: str) -> AnswerCall:
    async def said() -> str:
        return text

    return said


async def measured(one: ShadowSampler, hidden: str = "y", was_shown: bool = False) -> None:
    calls: dict[str, Any] = {"shown": says("x"), "hidden": says(hidden), "master": says("x")}
    await one.measure(QUERY, near(0.5), **calls, was_shown=was_shown)


async def test_a_seeded_fraction_is_measured() -> None:
    def sampled(seed: int) -> list[bool]:
        one = shadow(rate=0.1, at_once=1000, seed=seed)
        return [one.begins() for _ in range(2000)]

    assert 150 < sum(sampled(0)) < 250
    assert sampled(0) == sampled(0) != sampled(1)


async def test_an_unmeasured_gate_is_measured_first() -> None:
    gate = BenefitGate(min_samples=5)
    one = ShadowSampler(gate, same, rate=0.0, at_once=2, eager=True)
    for n in range(5):
        assert not gate.is_measured
        assert [one.begins() for _ in range(3)] == [True, True, False], n
        one.cancel()
        await measured(one)
    assert gate.is_measured
    assert not any(one.begins() for _ in range(100))
    patient = ShadowSampler(BenefitGate(min_samples=5), same, rate=0.0)
    assert not any(patient.begins() for _ in range(100))


async def test_concurrent_measurements_are_limited() -> None:
    one = shadow(at_once=2)
    assert [one.begins() for _ in range(3)] == [True, True, False]
    waiting = asyncio.Event()

    async def slow() -> str:
        await waiting.wait()
        return "a"

    tasks = [
        asyncio.create_task(
            one.measure(
                *(QUERY, near(0.5)),
                shown=says("a"),
                hidden=says("b"),
                master=slow,
                was_shown=False,
            )
        )
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    assert not one.begins()
    tasks[0].cancel()
    await asyncio.gather(*tasks[:1], return_exceptions=True)
    assert one.begins() and not one.begins()
    one.cancel()
    waiting.set()
    assert await tasks[1] == AgreementPair(1.0, 0.0, was_shown=False)
    assert [one.begins() for _ in range(3)] == [True, True, False]


async def test_samples_update_the_gate_and_the_quality() -> None:
    one = shadow()
    for number in range(20):
        assert one.begins()
        await measured(one, was_shown=number >= 15)
    assert one.gate.shows(near(0.5))
    quality = one.summary()
    assert (quality.n, quality.failed) == (20, 0)
    assert (quality.with_demonstrations.least, quality.without.most) == (1.0, 0.0)
    assert quality.gain.low > 0.5
    assert quality.served.least == quality.served.most == 0.25


async def test_undecided_samples_give_a_range_and_teach_the_gate_nothing() -> None:
    one = shadow(at_once=20)
    for hidden in "xx?yy?":
        assert one.begins()
        await measured(one, hidden=hidden)
    assert len(one.gate.state()["samples"]) == 4  # type: ignore[arg-type]
    quality = one.summary()
    found = quality.without
    assert (found.least, found.most, found.n, found.undecided) == (2 / 6, 4 / 6, 6, 2)
    assert found.low < found.least < found.most < found.high
    assert quality.served == found
    assert quality.gain.value == 0.5


async def test_a_gate_that_never_decides_does_not_measure_every_query_for_ever() -> None:
    one = ShadowSampler(BenefitGate(), same, rate=0.0, eager=True)
    for _ in range(MAX_EAGER):
        assert one.begins()
        await measured(one, hidden="?")
    assert not any(one.begins() for _ in range(10))


async def test_a_failed_model_gives_no_sample_and_no_error() -> None:
    one = shadow(at_once=1)

    async def fails() -> str:
        raise ServerFailedError("503")

    assert one.begins()
    calls: dict[str, Any] = {"shown": says("x"), "hidden": fails, "master": says("x")}
    assert await one.measure(QUERY, near(0.5), **calls, was_shown=True) is None
    assert (one.summary().n, one.summary().failed) == (0, 1)
    assert one.begins()


async def test_an_error_of_the_program_is_raised() -> None:
    one = shadow(at_once=1)

    async def broken() -> str:
        raise KeyError("x")

    assert one.begins()
    calls: dict[str, Any] = {"shown": says("x"), "hidden": says("x"), "master": broken}
    with pytest.raises(KeyError):
        await one.measure(QUERY, near(0.5), **calls, was_shown=True)
    assert one.begins()


@pytest.mark.parametrize("settings", [{"rate": 1.5}, {"at_once": 0}])
def test_invalid_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ShadowSampler(BenefitGate(), same, **settings)


@pytest.mark.parametrize(("rate", "begins"), [(0, False), (1, True)])
def test_a_rate_of_0_or_1_measures_no_or_every_query(rate: float, begins: bool) -> None:
    one = shadow(rate=rate, at_once=1000)
    assert [one.begins() for _ in range(100)] == [begins] * 100
