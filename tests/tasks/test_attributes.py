from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.tasks import attributes
from bottega.tasks.attributes import ATTRIBUTES, VALUES, Attributes, draw_values, is_held_out
from bottega.tasks.task import ASKED_BY


def test_answers_are_words_for_the_topic_that_the_question_names() -> None:
    task = Attributes(kb=60, asked=40, words="plain").draw(0)
    assert (len(task.knowledge), len(task.items), dict(task.episode_of)) == (60, 40, {})
    assert task.labels == tuple(word for words in VALUES.values() for word in words)
    for example in (*task.knowledge, *task.items):
        topic = example.tags["topic"]
        assert example.answer in VALUES[topic]
        words = set(example.query.text.lower().strip(".?").replace(",", "").split())
        assert words & set(ASKED_BY[topic])
    assert {e.tags["topic"] for e in task.knowledge} == set(ATTRIBUTES)
    pictures = {e.query.images for e in (*task.knowledge, *task.items)}
    assert len(pictures) == 100


def test_invented_words_are_fixed_by_the_seed_and_tell_topics_apart() -> None:
    first, again, other = (Attributes(kb=40, asked=2).draw(seed) for seed in (0, 0, 1))
    assert first == again
    assert first.labels != other.labels
    assert len(set(first.labels)) == sum(map(len, VALUES.values()))
    topics = defaultdict(set)
    for example in first.knowledge:
        topics[example.answer].add(example.tags["topic"])
    assert all(len(found) == 1 for found in topics.values())


@pytest.mark.parametrize(("combos", "held_out"), [("all", None), ("held-out", True)])
def test_only_asked_scenes_are_ever_held_out(
    monkeypatch: pytest.MonkeyPatch, combos: str, held_out: bool | None
) -> None:
    asked: list[bool | None] = []

    def spy(rng: torch.Generator, n: int, held_out: bool | None = None) -> torch.Tensor:
        asked.append(held_out)
        return draw_values(rng, n, held_out)

    monkeypatch.setattr(attributes, "draw_values", spy)
    Attributes(kb=3, asked=2, combos=combos).draw(0)
    assert asked == [None, held_out]


@given(st.integers(0, 2**31), st.booleans())
def test_held_out_pairs_are_never_drawn_for_training(seed: int, held_out: bool) -> None:
    values = draw_values(torch.Generator().manual_seed(seed), 50, held_out)
    assert (is_held_out(values) == held_out).all()


@pytest.mark.parametrize("knobs", [{"words": "long"}, {"combos": "some"}, {"kb": 0}])
def test_impossible_knobs_are_named(knobs: dict[str, int | str]) -> None:
    with pytest.raises(SettingError, match=next(iter(knobs))):
        Attributes(**knobs)  # type: ignore[arg-type]
