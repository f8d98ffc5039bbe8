from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.tasks import attributes
from bottega.tasks.attributes import ATTRIBUTES, VALUES, AttributeTask, is_held_out, sample_values
from bottega.tasks.task import TOPIC_WORDS


def test_answers_belong_to_the_topic_of_the_question() -> None:
    task = AttributeTask(examples=60, queries=40, words="plain").generate(0)
    assert (len(task.knowledge), len(task.items), dict(task.episode_of)) == (60, 40, {})
    assert task.labels == tuple(word for words in VALUES.values() for word in words)
    for example in (*task.knowledge, *task.items):
        topic = example.tags["topic"]
        assert example.answer in VALUES[topic]
        words = set(example.query.text.lower().strip(".?").replace(",", "").split())
        assert words & set(TOPIC_WORDS[topic])
    assert {e.tags["topic"] for e in task.knowledge} == set(ATTRIBUTES)
    images = {e.query.images for e in (*task.knowledge, *task.items)}
    assert len(images) == 100


def test_the_seed_fixes_invented_words_and_each_word_has_one_topic() -> None:
    first, again, other = (
        AttributeTask(examples=40, queries=2).generate(seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.labels != other.labels
    assert len(set(first.labels)) == sum(map(len, VALUES.values()))
    topics = defaultdict(set)
    for example in first.knowledge:
        topics[example.answer].add(example.tags["topic"])
    assert all(len(found) == 1 for found in topics.values())


@pytest.mark.parametrize(("combos", "held_out"), [("all", None), ("held-out", True)])
def test_only_query_scenes_can_be_held_out(
    monkeypatch: pytest.MonkeyPatch, combos: str, held_out: bool | None
) -> None:
    calls: list[bool | None] = []

    def spy(rng: torch.Generator, n: int, held_out: bool | None = None) -> torch.Tensor:
        calls.append(held_out)
        return sample_values(rng, n, held_out)

    monkeypatch.setattr(attributes, "sample_values", spy)
    AttributeTask(examples=3, queries=2, combos=combos).generate(0)
    assert calls == [None, held_out]


@given(st.integers(0, 2**31), st.booleans())
def test_values_match_the_held_out_flag(seed: int, held_out: bool) -> None:
    values = sample_values(torch.Generator().manual_seed(seed), 50, held_out)
    assert (is_held_out(values) == held_out).all()


@pytest.mark.parametrize("options", [{"words": "long"}, {"combos": "some"}, {"examples": 0}])
def test_invalid_options_are_named(options: dict[str, int | str]) -> None:
    with pytest.raises(SettingError, match=next(iter(options))):
        AttributeTask(**options)  # type: ignore[arg-type]
