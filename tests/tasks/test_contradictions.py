from __future__ import annotations

import random
from collections import Counter, defaultdict
from statistics import mean

import pytest

from bottega.errors import SettingError
from bottega.tasks.contradictions import ContradictionTask, contradictory_scores
from bottega.tasks.glyphs import NAMES
from bottega.tasks.task import RELATIONS, TOPIC_WORDS, TaskData
from bottega.types import Example

SMALL = {"episodes": 2, "queries": 12}


@pytest.fixture(scope="module")
def task() -> TaskData:
    return ContradictionTask(**SMALL, passages=3).generate(0)


def favoured(task: TaskData, item: Example) -> str:
    scores = task.passage_scores[str(item.id)]
    return max(scores, key=lambda id: scores[id])


def test_passages_state_different_things_about_every_fact(task: TaskData) -> None:
    things = defaultdict(set)
    for passage in task.knowledge:
        words = passage.query.text.split()
        assert passage.answer == ""
        assert passage.tags["name"] in words
        assert set(TOPIC_WORDS[passage.tags["relation"]]) & set(words)
        things[tuple(passage.tags.values())].add(words[-1])
    assert len(things) == 2 * len(NAMES) * len(RELATIONS)
    assert {len(different) for different in things.values()} == {3}


def test_one_of_the_scored_passages_contains_the_answer(task: TaskData) -> None:
    passages = {str(passage.id): passage for passage in task.knowledge}
    for item in task.items:
        scored = [passages[id] for id in task.passage_scores[str(item.id)]]
        about = {(one.tags["episode"], one.tags["name"], one.tags["relation"]) for one in scored}
        assert about == {(item.tags["episode"], item.tags["name"], item.tags["relation"])}
        right = passages[item.tags["passage"]]
        found = [one for one in task.knowledge if item.answer in one.query.text.split()]
        assert found == [right]
        assert len(scored) == 3
        assert right in scored


def test_queries_reveal_no_name_and_no_answer(task: TaskData) -> None:
    for item in task.items:
        text = f"{item.query.text} {item.query.id} {item.query.choices}"
        assert item.tags["name"] not in text
        assert item.answer not in text
        assert len(item.query.images) == 1


def test_reliability_changes_the_scores_alone() -> None:
    never, always = (ContradictionTask(**SMALL, reliability=r).generate(4) for r in (0.0, 1.0))
    assert (never.knowledge, never.items) == (always.knowledge, always.items)
    for item in always.items:
        assert favoured(always, item) == item.tags["passage"] != favoured(never, item)
        assert sorted(always.passage_scores[str(item.id)].values()) == sorted(
            never.passage_scores[str(item.id)].values()
        )
    assert ContradictionTask(**SMALL, reliability=1.0).generate(4) == always
    assert ContradictionTask(**SMALL, reliability=1.0).generate(5) != always


@pytest.mark.parametrize(("passages", "reliability"), [(2, 0.5), (2, 0.9), (4, 0.7)])
def test_only_readers_of_scores_do_better_than_chance(passages: int, reliability: float) -> None:
    rng = random.Random(0)
    highest, places, wrong = [], Counter[int](), Counter[int]()
    for _ in range(4000):
        right = rng.randrange(passages)
        scores = contradictory_scores(rng, right, passages, reliability)
        assert len(scores) == len(set(scores)) == passages
        assert 0 <= min(scores) < max(scores) <= 1
        chosen = scores.index(max(scores))
        highest.append(chosen == right)
        places[chosen] += 1
        if chosen != right:
            wrong[(chosen - right) % passages] += 1
    assert abs(mean(highest) - reliability) < 0.025
    # The position of the highest score and its distance to the right one carry no information.
    assert all(abs(count / 4000 - 1 / passages) < 0.03 for count in places.values())
    assert max(wrong.values()) < 1.2 * min(wrong.values())


def test_right_passages_are_equally_often_any_version() -> None:
    task = ContradictionTask(episodes=1, queries=80).generate(0)
    versions = Counter(item.tags["passage"][-1] for item in task.items)
    assert min(versions["0"], versions["1"]) > 25
    # Two questions about one fact may have different answers: the texts decide nothing.
    answers = defaultdict(set)
    for item in task.items:
        answers[item.tags["name"], item.tags["relation"]].add(item.answer)
    assert any(len(different) == 2 for different in answers.values())


def test_invalid_options_are_named() -> None:
    with pytest.raises(SettingError, match="passages must be 2 to 10, got 1"):
        ContradictionTask(passages=1)
    with pytest.raises(SettingError, match=r"reliability must be between 0 and 1, got 1\.5"):
        ContradictionTask(reliability=1.5)
