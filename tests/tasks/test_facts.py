from __future__ import annotations

import pytest

from bottega.errors import SettingError
from bottega.tasks.glyphs import NAMES, FactTask
from bottega.tasks.task import RELATIONS, TOPIC_WORDS, TaskData


@pytest.fixture(scope="module")
def task() -> TaskData:
    return FactTask(episodes=3, queries=10).generate(0)


def test_passages_state_every_relation_of_every_name(task: TaskData) -> None:
    assert len(task.knowledge) == 3 * len(NAMES) * len(RELATIONS)
    for passage in task.knowledge:
        assert (passage.answer, passage.query.images) == ("", ())
        assert passage.tags["name"] in passage.query.text.split()
        assert set(TOPIC_WORDS[passage.tags["relation"]]) & set(passage.query.text.split())


def test_one_passage_per_episode_contains_the_answer(task: TaskData) -> None:
    passages = {str(passage.id): passage for passage in task.knowledge}
    for item in task.items:
        right = passages[item.tags["passage"]]
        found = [
            p
            for p in task.knowledge
            if p.tags["episode"] == item.tags["episode"] and item.answer in p.query.text.split()
        ]
        assert found == [right]
        assert right.tags["name"] == item.tags["name"]


def test_queries_reveal_no_name_and_no_answer(task: TaskData) -> None:
    for item in task.items:
        text = f"{item.query.text} {item.query.id} {item.query.choices}"
        assert item.tags["name"] not in text
        assert item.answer not in text
        assert len(item.query.images) == 1


def test_the_seed_fixes_the_task(task: TaskData) -> None:
    assert FactTask(episodes=3, queries=10).generate(0) == task
    assert FactTask(episodes=3, queries=10).generate(1) != task


def test_invalid_options_are_named() -> None:
    with pytest.raises(SettingError, match="queries"):
        FactTask(queries=0)
