from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.tasks.rules import NUMBERS, RULES, Rules, misapplied
from bottega.tasks.task import Task
from bottega.types import Example, Query

NUMBER = st.integers(0, NUMBERS - 1)


@pytest.fixture(scope="module")
def task() -> Task:
    return Rules(episodes=6, shown=9, asked=5).draw(0)


def worked(example: Example) -> str:
    """The answer, worked out anew from the rationale."""
    rule, left, right = str(example.rationale).split()
    return str(RULES[rule](int(left), int(right)))


def numbers(example: Example) -> tuple[str, ...]:
    return tuple(str(example.rationale).split()[1:])


def test_rationales_lead_to_the_answers(task: Task) -> None:
    assert (len(task.knowledge), len(task.items), task.labels) == (54, 30, ())
    assert all(worked(e) == e.answer for e in (*task.knowledge, *task.items))


def test_every_rule_of_an_episode_is_shown(task: Task) -> None:
    shown: defaultdict[str, set[str]] = defaultdict(set)
    for example in task.knowledge:
        shown[example.tags["episode"]].add(example.tags["rule"])
    assert set(map(len, shown.values())) == {3}
    assert all(item.tags["rule"] in shown[item.tags["episode"]] for item in task.items)
    assert len({frozenset(rules) for rules in shown.values()}) > 1


def test_asked_numbers_are_never_shown(task: Task) -> None:
    shown, asked = ({numbers(e) for e in part} for part in (task.knowledge, task.items))
    assert shown.isdisjoint(asked)
    pictures = {e.query.images for e in (*task.knowledge, *task.items)}
    assert len(pictures) == len(task.knowledge) + len(task.items)


def test_the_seed_decides_everything(task: Task) -> None:
    assert Rules(episodes=6, shown=9, asked=5).draw(0) == task
    assert Rules(episodes=6, shown=9, asked=5).draw(1) != task


@given(st.sampled_from(list(RULES)), NUMBER, NUMBER, st.randoms())
def test_a_misapplied_rule_is_wrong_and_consistent(
    rule: str, left: int, right: int, rng: random.Random
) -> None:
    right_one = Example(Query("?"), str(RULES[rule](left, right)), rationale="")
    right_one = replace(right_one, rationale=f"{rule} {left} {right}")
    wrong = misapplied(right_one, rng)
    if wrong is None:
        assert {work(left, right) for work in RULES.values()} == {int(right_one.answer)}
        return
    assert wrong.answer != right_one.answer
    assert worked(wrong) == wrong.answer
    assert numbers(wrong) == (str(left), str(right))


@pytest.mark.parametrize("knobs", [{"symbols": 5}, {"shown": 2}, {"asked": 0}])
def test_impossible_knobs_are_named(knobs: dict[str, int]) -> None:
    with pytest.raises(SettingError, match=next(iter(knobs))):
        Rules(**knobs)
