"""Annotated answers are spelled as the base model itself would generate them."""

from __future__ import annotations

from functools import cache

from bottega.bundled import bundled_folder
from bottega.compression.objective import TrainingExample, TrainingObjective
from bottega.generation.loaded import LoadedModel
from bottega.recipes.racc_training import training_objective
from bottega.tasks.glyphs import FactTask
from bottega.types import Example, Query
from tests.builders import solid_image


@cache
def apprentice() -> tuple[LoadedModel, TrainingObjective]:
    model = LoadedModel.load(str(bundled_folder()), "cpu", "float32")
    return model, training_objective(model)


@cache
def facts() -> tuple[TrainingExample, ...]:
    """Return eight questions about synthetic facts, each with its passage and two others."""
    task = FactTask(queries=8, episodes=1).generate(7)
    passages = {str(one.query.id): one for one in task.knowledge}
    training_examples = []
    for item in task.items:
        right = passages[item.tags["passage"]]
        shown = (right, *[one for one in task.knowledge if one is not right][:2])
        training_examples.append(
            TrainingExample(item.query, shown, (1.0, 0.0, 0.0), (True, False, False), item.answer)
        )
    return tuple(training_examples)


def pieces(rows: list[list[int]]) -> list[list[str]]:
    tokenizer = apprentice()[0].processor.tokenizer
    return [[tokenizer.decode([token]) for token in row] for row in rows]


def test_answer_from_a_passage_begins_with_a_space() -> None:
    """The targets of both trainings are the same tokens wherever the model answers correctly."""
    objective = apprentice()[1]
    copied, annotated = (
        pieces(objective._teacher_replies(facts())),
        pieces(objective._annotated(facts())),
    )
    right = [
        index
        for index, example in enumerate(facts())
        if "".join(copied[index][:-1]).strip() == example.answer
    ]
    assert len(right) >= 6
    assert [annotated[index] for index in right] == [copied[index] for index in right]
    assert all(one[0].startswith(" ") for one in annotated)


def test_answer_from_a_demonstration_begins_without_a_space() -> None:
    shown = tuple(
        Example(Query("What is in the image?", (solid_image(60 * index),)), word)
        for index, word in enumerate(("drimok", "rolox", "darun"))
    )
    query = Query("What is in the image?", shown[1].query.images)
    example = TrainingExample(query, shown, (0.0, 1.0, 0.0), (False, True, False), "rolox")
    assert pieces(apprentice()[1]._annotated([example])) == [["r", "ol", "o", "x", "<end>"]]


def test_answer_tokens_at_reply_start_and_inside_text() -> None:
    texts = apprentice()[1].base_inputs
    assert pieces(texts.answers([Query("what")], ["rolox"])) == [["r", "ol", "o", "x"]]
    assert pieces(texts.answers_in_text(["rolox", "red house"])) == [
        [" r", "ol", "o", "x"],
        [" red", " house"],
    ]
    assert texts.answers_in_text([""]) == [[]]
