from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.evaluation.methods.controls import swap_image, swap_question, swapped_prompter
from bottega.prompting import InterleavedPrompter
from tests.builders import candidates
from tests.evaluation.builders import episodic_benchmark, passage_benchmark

DATA = passage_benchmark()


def test_image_swap_uses_the_image_of_another_item() -> None:
    other = swap_image(DATA, seed=0)
    images = {item.query.images for item in DATA.items}
    for item in DATA.items:
        swapped = other(item.query)
        assert swapped.images != item.query.images
        assert swapped.images in images
        assert replace(swapped, images=item.query.images) == item.query
    assert swap_image(DATA, seed=0)(DATA.items[0].query) == other(DATA.items[0].query)


def test_question_swap_uses_a_question_about_another_topic() -> None:
    items = [
        replace(item, query=replace(item.query, text=f"{item.tags['topic']}, {i}?"))
        for i, item in enumerate(DATA.items)
    ]
    data = replace(DATA, items=tuple(items))
    other = swap_question(data, seed=0)
    topic = {item.query.text: item.tags["topic"] for item in items}
    for item in items:
        swapped = other(item.query)
        assert topic[swapped.text] != item.tags["topic"]
        assert swapped.images == item.query.images


def test_swap_changes_only_the_last_turn_and_keeps_choices() -> None:
    swap = swapped_prompter(InterleavedPrompter(), swap_image(DATA, seed=0))
    query = replace(DATA.items[0].query, choices=("a", "b"))
    shown = candidates("a", "b")
    plain, swapped = InterleavedPrompter()(query, shown).messages, swap(query, shown).messages
    assert swapped[:-1] == plain[:-1]
    assert swapped[-1].parts[1] == plain[-1].parts[1]
    assert swapped[-1].parts[0] != plain[-1].parts[0]


def test_swap_without_alternatives_raises() -> None:
    with pytest.raises(SettingError, match="needs different questions"):
        swap_question(episodic_benchmark(), seed=0)
    single = replace(DATA, items=DATA.items[:1])
    with pytest.raises(SettingError, match="needs items with different images"):
        swap_image(single, seed=0)
