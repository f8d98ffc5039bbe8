from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.methods import Method, Outcome
from bottega.evaluation.metrics import paired_difference
from bottega.evaluation.pairing import paired
from bottega.evaluation.runner import Result, Scored, evaluate
from bottega.types import Answer, Query
from tests.evaluation.builders import episodic

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
DATA = episodic()
RIGHT = {item.query: item.answer for item in DATA.items}


@given(PAIRS, st.integers(0, 9))
def test_the_interval_holds_the_difference_of_the_accuracies(
    pairs: list[tuple[bool, bool]], seed: int
) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    gain = paired_difference(ours, theirs, seed=seed)
    assert gain.value == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert -1 <= gain.low <= gain.high <= 1
    assert gain == paired_difference(ours, theirs, seed=seed)
    back = paired_difference(theirs, ours, seed=seed)
    assert back.value == pytest.approx(-gain.value)


def test_pairing_is_narrower_than_two_intervals() -> None:
    theirs = [True, False] * 100
    ours = [True, *theirs[1:]]
    ours[1:20:2] = [True] * 10  # right wherever theirs is, and ten times more
    gain = paired_difference(ours, theirs, seed=0)
    assert gain.value == pytest.approx(0.05)
    assert 0 < gain.low < 0.05 < gain.high < 0.1


def test_equal_answers_differ_by_nothing() -> None:
    gain = paired_difference([True, False], [True, False], seed=0)
    assert (gain.value, gain.low, gain.high) == (0, 0, 0)


async def _run(name: str, shots: int, wrong: int) -> tuple[Result, list[Scored]]:
    bad = {item.query for item in DATA.items[:wrong]}

    async def answer(query: Query) -> Outcome:
        label = "?" if query in bad else RIGHT[query]
        return Outcome(Answer(label, labels=(label,)))

    return await evaluate(DATA, Method(name, shots, answer), concurrency=2, seed=0)


async def test_methods_are_paired_at_the_same_number_of_shots() -> None:
    runs = [await _run("visual-rag", 5, 0), await _run("vote", 5, 3), await _run("vote", 10, 6)]
    [one] = paired(runs, seed=0)
    assert (one.method, one.against, one.shots, one.n) == ("visual-rag", "vote", 5, 6)
    assert one.value == 0.5
    assert paired(runs[1:], seed=0) == []


async def test_only_items_that_both_answered_are_compared() -> None:
    (result, scored), vote = await _run("visual-rag", 5, 0), await _run("vote", 5, 3)
    [one] = paired([(result, scored[2:]), vote], seed=0)
    assert (one.n, one.value) == (4, 0.25)
    assert paired([(result, []), vote], seed=0) == []
