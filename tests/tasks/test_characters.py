from __future__ import annotations

from collections import Counter

import pytest

from bottega.errors import SettingError
from bottega.tasks import glyphs
from bottega.tasks.glyphs import Glyphs
from bottega.tasks.task import Task


@pytest.fixture(scope="module")
def task() -> Task:
    return Glyphs().draw(0)


def test_every_episode_shows_and_asks_each_of_its_characters_once(task: Task) -> None:
    assert len(task.items) == 500
    by_episode = Counter((task.episode_of[str(e.id)], e.answer) for e in task.knowledge)
    assert set(by_episode.values()) == {1}
    assert by_episode.keys() == {(task.episode_of[str(i.id)], i.answer) for i in task.items}
    for item in task.items:
        assert item.answer in item.query.choices
        assert len(set(item.query.choices)) == 20
    assert set(task.labels) == {item.answer for item in task.items}


def test_ids_are_unique_and_pictures_distinct(task: Task) -> None:
    everything = (*task.knowledge, *task.items)
    assert len({e.query.id for e in everything}) == len(everything) == len(task.episode_of)
    assert len({e.query.images for e in everything}) == len(everything)
    assert all(e.query.id == e.id for e in everything)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes: drawing costs time."""
    monkeypatch.setattr(glyphs, "LEAST_EPISODES", 2)
    monkeypatch.setattr(glyphs, "LEAST_ASKED", 40)


@pytest.mark.usefixtures("few")
def test_the_seed_decides_everything() -> None:
    assert Glyphs().draw(0) == Glyphs().draw(0)


def test_there_are_at_least_500_items_and_25_episodes() -> None:
    assert [Glyphs(ways=ways).episodes for ways in (2, 20, 30)] == [250, 25, 25]


@pytest.mark.usefixtures("few")
def test_another_seed_draws_other_characters(task: Task) -> None:
    other = Glyphs(ways=30).draw(1)
    assert len(other.items) == 60
    assert other.items[0].query.images != task.items[0].query.images
    assert other.labels != task.labels


@pytest.mark.usefixtures("few")
def test_styles_and_alphabets_are_knobs(task: Task) -> None:
    coloured = Glyphs(ways=20, alphabets=4, style="any").draw(0)
    assert len(coloured.items) == 40
    assert coloured.items[0].query.images != task.items[0].query.images
    paper = [item.query.images[0].decode(1).getpixel((0, 0)) for item in task.items]
    assert Counter(paper).most_common(1)[0][0] == (0, 0, 0)


@pytest.mark.parametrize(
    "knobs", [{"ways": 1}, {"shots": 0}, {"alphabets": 21}, {"style": "ink"}, {"ways": 101}]
)
def test_impossible_knobs_are_named(knobs: dict[str, int | str]) -> None:
    with pytest.raises(SettingError, match=next(iter(knobs))) as raised:
        Glyphs(**knobs)  # type: ignore[arg-type]
    assert raised.value.hint
