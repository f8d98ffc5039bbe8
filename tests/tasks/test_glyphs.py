from __future__ import annotations

from collections import Counter

import pytest
import torch

from bottega.errors import SettingError
from bottega.tasks import glyphs
from bottega.tasks.glyphs import GlyphTask
from bottega.tasks.task import RandomSources, TaskData


@pytest.fixture(scope="module")
def task() -> TaskData:
    return GlyphTask().generate(0)


def test_each_character_has_one_example_and_one_query_per_episode(task: TaskData) -> None:
    assert len(task.items) == 500
    by_episode = Counter((task.episode_of[str(e.id)], e.answer) for e in task.knowledge)
    assert set(by_episode.values()) == {1}
    assert by_episode.keys() == {(task.episode_of[str(i.id)], i.answer) for i in task.items}
    for item in task.items:
        assert item.answer in item.query.choices
        assert len(set(item.query.choices)) == 20
    assert set(task.labels) == {item.answer for item in task.items}


def test_ids_and_images_are_unique(task: TaskData) -> None:
    everything = (*task.knowledge, *task.items)
    assert len({e.query.id for e in everything}) == len(everything) == len(task.episode_of)
    assert len({e.query.images for e in everything}) == len(everything)
    assert all(e.query.id == e.id for e in everything)


@pytest.fixture
def two_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two episodes: rendering takes time."""
    monkeypatch.setattr(glyphs, "MIN_EPISODES", 2)
    monkeypatch.setattr(glyphs, "MIN_QUERIES", 40)


@pytest.mark.usefixtures("two_episodes")
def test_equal_seeds_generate_equal_tasks() -> None:
    assert GlyphTask().generate(0) == GlyphTask().generate(0)


def test_there_are_at_least_500_items_and_25_episodes() -> None:
    assert [GlyphTask(ways=ways).episodes for ways in (2, 20, 30)] == [250, 25, 25]


@pytest.mark.usefixtures("two_episodes")
def test_another_seed_generates_other_characters(task: TaskData) -> None:
    other = GlyphTask(ways=30).generate(1)
    assert len(other.items) == 60
    assert other.items[0].query.images != task.items[0].query.images
    assert other.labels != task.labels


@pytest.mark.usefixtures("two_episodes")
def test_style_and_alphabets_change_the_images(task: TaskData) -> None:
    coloured = GlyphTask(ways=20, alphabets=4, style="any").generate(0)
    assert len(coloured.items) == 40
    assert coloured.items[0].query.images != task.items[0].query.images
    paper = [item.query.images[0].decode(1).getpixel((0, 0)) for item in task.items]
    assert Counter(paper).most_common(1)[0][0] == (0, 0, 0)


@pytest.mark.parametrize(
    "options", [{"ways": 1}, {"shots": 0}, {"alphabets": 21}, {"style": "ink"}, {"ways": 101}]
)
def test_invalid_options_are_named(options: dict[str, int | str]) -> None:
    with pytest.raises(SettingError, match=next(iter(options))) as raised:
        GlyphTask(**options)  # type: ignore[arg-type]
    assert raised.value.hint


def test_equal_seeds_give_equal_words_and_images() -> None:
    first, again, other = RandomSources(3), RandomSources(3), RandomSources(4)
    assert first.words.random() == again.words.random() != other.words.random()
    shown = [torch.rand(4, generator=sources.images) for sources in (first, again, other)]
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[0], shown[2])


def test_task_seeds_differ_from_the_small_seeds_of_training() -> None:
    small = {torch.Generator().manual_seed(n).initial_seed() for n in range(1000)}
    assert small.isdisjoint(RandomSources(n).images.initial_seed() for n in range(1000))
