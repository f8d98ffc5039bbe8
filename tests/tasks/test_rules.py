from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.tasks.rules import NUMBERS, RULES, RuleTask, misapply_rule
from bottega.tasks.task import TaskData
from bottega.types import Example, Query

NUMBER = st.integers(0, NUMBERS - 1)


@pytest.fixture(scope="module")
def task() -> TaskData:
    return RuleTask(episodes=6, examples=9, queries=5).generate(0)


def solved(example: Example) -> str:
    """Return the answer that follows from the rationale."""
    rule, left, right = str(example.rationale).split()
    return str(RULES[rule](int(left), int(right)))


def numbers(example: Example) -> tuple[str, ...]:
    return tuple(str(example.rationale).split()[1:])


def test_rationales_lead_to_the_answers(task: TaskData) -> None:
    assert (len(task.knowledge), len(task.items), task.labels) == (54, 30, ())
    assert all(solved(e) == e.answer for e in (*task.knowledge, *task.items))


def test_examples_cover_every_rule_of_their_episode(task: TaskData) -> None:
    shown: defaultdict[str, set[str]] = defaultdict(set)
    for example in task.knowledge:
        shown[example.tags["episode"]].add(example.tags["rule"])
    assert set(map(len, shown.values())) == {3}
    assert all(item.tags["rule"] in shown[item.tags["episode"]] for item in task.items)
    assert len({frozenset(rules) for rules in shown.values()}) > 1


def test_number_pairs_of_queries_occur_in_no_example(task: TaskData) -> None:
    shown, queried = ({numbers(e) for e in part} for part in (task.knowledge, task.items))
    assert shown.isdisjoint(queried)
    images = {e.query.images for e in (*task.knowledge, *task.items)}
    assert len(images) == len(task.knowledge) + len(task.items)


def test_the_seed_fixes_the_task(task: TaskData) -> None:
    assert RuleTask(episodes=6, examples=9, queries=5).generate(0) == task
    assert RuleTask(episodes=6, examples=9, queries=5).generate(1) != task


@given(st.sampled_from(list(RULES)), NUMBER, NUMBER, st.randoms())
def test_a_misapplied_rule_is_wrong_and_consistent(
    rule: str, left: int, right: int, rng: random.Random
) -> None:
    right_one = Example(Query("?"), str(RULES[rule](left, right)), rationale="")
    right_one = replace(right_one, rationale=f"{rule} {left} {right}")
    wrong = misapply_rule(right_one, rng)
    if wrong is None:
        assert {work(left, right) for work in RULES.values()} == {int(right_one.answer)}
        return
    assert wrong.answer != right_one.answer
    assert solved(wrong) == wrong.answer
    assert numbers(wrong) == (str(left), str(right))


@pytest.mark.parametrize("options", [{"symbols": 5}, {"examples": 2}, {"queries": 0}])
def test_invalid_options_are_named(options: dict[str, int]) -> None:
    with pytest.raises(SettingError, match=next(iter(options))):
        RuleTask(**options)
