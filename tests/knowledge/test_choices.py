"""Answer choices are part of a question: other choices make another example."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bottega._util.identity import identity, is_excluded
from bottega.knowledge import KnowledgeBase
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder

IMAGE = solid_image(7)


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def colour(answer: str, *choices: str, text: str = "Which colour?") -> Example:
    return Example(Query(text, (IMAGE,), choices), answer)


def test_other_choices_make_another_example(kb: KnowledgeBase) -> None:
    one, other, free = colour("red", "red", "blue"), colour("red", "red", "grey"), colour("red")
    assert kb.add([one, other, free]).new == 3
    assert {example.query.choices for example in kb} == {("red", "blue"), ("red", "grey"), ()}
    assert kb.add([one, other, free]).new == 0


def test_newer_answer_replaces_only_the_same_choices(kb: KnowledgeBase) -> None:
    kb.replace([colour("red", "red", "blue"), colour("green", "green", "grey")])
    kb.replace([colour("blue", "red", "blue")])
    answers = {example.query.choices: example.answer for example in kb}
    assert answers == {("red", "blue"): "blue", ("green", "grey"): "green"}


def test_context_and_choices_are_not_confused(kb: KnowledgeBase) -> None:
    in_context = replace(colour("red"), tags={"context": "red"})
    assert kb.add([in_context, colour("red", "red")]).new == 2


def test_choices_and_context_survive_an_export(kb: KnowledgeBase, tmp_path: Path) -> None:
    kb.add([colour("red", "red", "blue"), colour("red", "red", "grey")])
    kb.export_to(tmp_path / "out")
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as again:
        assert again.import_from(tmp_path / "out").new == 2
        assert again.ids() == kb.ids()


def test_search_may_exclude_the_same_question_only(kb: KnowledgeBase) -> None:
    text_example = colour("red", "red", "blue").query
    stored = {
        "other text": colour("red", "red", "blue", text="Which shape?"),
        "other choices": colour("red", "red", "grey"),
        "the same": colour("blue", "red", "blue"),
        "no choices": colour("red"),
        "other context": replace(colour("blue", "red", "blue"), tags={"context": "c"}),
    }
    kb.add(stored.values())
    names = {identity(example): name for name, example in stored.items()}

    def found(query: Query) -> set[str]:
        hits = kb.search(query, 9, exclude="same-question")
        assert {hit.example.id for hit in hits} == {
            id for id, name in names.items() if not is_excluded(query, kb.get(id), "same-question")
        }
        return {names[str(hit.example.id)] for hit in hits}

    assert found(text_example) == {"other text", "other choices", "other context"}
    assert found(replace(text_example, context="c")) == {"other text", "other choices"}
    assert found(replace(text_example, images=())) == set(stored)
    by_id = Query("?", id=next(iter(names)))
    assert found(by_id) == set(stored) - {"other text"}
    assert kb.search(Query("?", (IMAGE,)), 9) == []  # the default excludes the image
    (none,) = kb.nearest(kb.vectors([next(iter(names))]), 9, excluded_for=[text_example])
    assert none == []


def test_search_excludes_a_text_question_itself(kb: KnowledgeBase) -> None:
    kb.add([Example(Query("Why?"), "because"), Example(Query("How?"), "so")])
    (found,) = kb.search(Query("Why?"), 9, exclude="same-question")
    assert found.example.query.text == "How?"
