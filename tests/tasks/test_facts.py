from __future__ import annotations

import pytest

from bottega.errors import SettingError
from bottega.tasks.facts import Facts
from bottega.tasks.glyphs import NAMES
from bottega.tasks.task import ASKED_BY, RELATIONS, Task


@pytest.fixture(scope="module")
def task() -> Task:
    return Facts(episodes=3, asked=10).draw(0)


def test_passages_say_every_relation_of_every_name(task: Task) -> None:
    assert len(task.knowledge) == 3 * len(NAMES) * len(RELATIONS)
    for passage in task.knowledge:
        assert (passage.answer, passage.query.images) == ("", ())
        assert passage.tags["name"] in passage.query.text.split()
        assert set(ASKED_BY[passage.tags["relation"]]) & set(passage.query.text.split())


def test_the_right_passage_holds_the_answer_and_no_other_of_its_episode_does(task: Task) -> None:
    passages = {str(passage.id): passage for passage in task.knowledge}
    for item in task.items:
        right = passages[item.tags["passage"]]
        telling = [
            p
            for p in task.knowledge
            if p.tags["episode"] == item.tags["episode"] and item.answer in p.query.text.split()
        ]
        assert telling == [right]
        assert right.tags["name"] == item.tags["name"]


def test_the_query_tells_neither_the_name_nor_the_passage(task: Task) -> None:
    for item in task.items:
        asked = f"{item.query.text} {item.query.id} {item.query.choices}"
        assert item.tags["name"] not in asked
        assert item.answer not in asked
        assert len(item.query.images) == 1


def test_the_seed_decides_everything(task: Task) -> None:
    assert Facts(episodes=3, asked=10).draw(0) == task
    assert Facts(episodes=3, asked=10).draw(1) != task


def test_impossible_knobs_are_named() -> None:
    with pytest.raises(SettingError, match="asked"):
        Facts(asked=0)
