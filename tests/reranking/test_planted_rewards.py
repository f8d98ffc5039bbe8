"""The tree against flat draws on planted rewards: no model, known values, noisy rewards.

A world has 20 candidates, whose scores say nothing about their use. A sequence of three is of use
if it begins with one of the four good candidates, and of full use with a second one: the landscape
on which a tree can reuse a good beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

import pytest

from bottega.reranking import RewardValue
from bottega.reranking.monte_carlo_tree import MonteCarloTree
from bottega.reranking.selection import sample_by_score
from bottega.types import Answer, Candidate, Example, Query

COUNT, DEPTH, GOOD, NOISE, WORLDS = 20, 3, 4, 0.2, 150
Value = Callable[[Sequence[Candidate]], float]
Choice = Callable[[list[Candidate], Value, int, Random], Sequence[Candidate]]


def world(seed: int) -> tuple[list[Candidate], Value]:
    """Return candidates, the highest score first, and the use of a sequence."""
    random = Random(seed)
    scores = sorted((random.gauss(0, 1) for _ in range(COUNT)), reverse=True)
    found = [Candidate(Example(Query(str(i)), "a"), score) for i, score in enumerate(scores)]
    good = {found[i].example.query.text for i in random.sample(range(COUNT), GOOD)}

    def value(shown: Sequence[Candidate]) -> float:
        hits = [one.example.query.text in good for one in shown]
        return min(1.0, sum(hits) / 2) if hits[0] else 0.0

    return found, value


def noisy(value: float, random: Random) -> float:
    return min(1.0, max(0.0, value + NOISE * random.gauss(0, 1)))


def tree_of(width: int) -> Choice:
    def choose(
        found: list[Candidate], value: Value, rollouts: int, random: Random
    ) -> Sequence[Candidate]:
        tree = MonteCarloTree(found, DEPTH, width=width, random=random)
        for i in range(rollouts):
            leaf = tree.sample() if i else tree.greedy()
            assert leaf is not None
            leaf.answer = Answer("x")
            tree.finish(leaf, RewardValue(noisy(value(tree.demonstrations(leaf)), random)))
        best = tree.best()
        assert best is not None
        return tree.demonstrations(best)

    return choose


def flat(
    found: list[Candidate], value: Value, rollouts: int, random: Random
) -> Sequence[Candidate]:
    drawn = [sample_by_score(found, DEPTH, random) for _ in range(rollouts - 1)]
    return max([found[:DEPTH], *drawn], key=lambda shown: noisy(value(shown), random))


def mean_value(choose: Choice, rollouts: int) -> float:
    values = []
    for seed in range(WORLDS):
        found, value = world(seed)
        values.append(value(choose(found, value, rollouts, Random(seed))))
    return fmean(values)


@pytest.mark.parametrize("rollouts", [27])
def test_a_wide_tree_beats_flat_draws_where_a_good_beginning_matters(rollouts: int) -> None:
    wide, narrow, drawn = (
        mean_value(choose, rollouts) for choose in (tree_of(COUNT), tree_of(3), flat)
    )
    assert wide > drawn + 0.05
    # Only three examples may ever be first.
    assert narrow < drawn - 0.2


def test_a_tree_chooses_better_than_its_first_branch() -> None:
    assert mean_value(tree_of(COUNT), 10) > mean_value(tree_of(COUNT), 1) + 0.3
