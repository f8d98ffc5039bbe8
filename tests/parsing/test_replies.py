"""Tests with replies of base, chat and vision models and the labels that a person reads in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from bottega.parsing import (
    ChoiceParser,
    FinalAnswerParser,
    LabelParser,
    RationaleParser,
)
from bottega.protocols import Parser
from bottega.types import Completion, Query


@dataclass(frozen=True)
class Row:
    """Reply of one kind of model; `label` is None if a person would read no label in it.

    Rows with `parsers="choice"` are replies to multiple choice, which may name an option by its
    letter. `choice` is their reading of a label that `LabelParser` finds too uncertain.
    """

    model: str
    query: str
    choices: tuple[str, ...]
    reply: str
    label: str | None
    parsers: str = "all"
    choice: str | None = None


def read_table() -> list[Row]:
    lines = Path(__file__).with_name("replies.jsonl").read_text("utf-8").splitlines()
    rows = map(json.loads, lines)
    return [Row(**{**row, "choices": tuple(row["choices"])}) for row in rows]


EVERY_ROW = read_table()
ROWS = [row for row in EVERY_ROW if row.parsers == "all"]
WITH_LABEL = [row for row in ROWS if row.label is not None]
WITHOUT_LABEL = [row for row in ROWS if row.label is None]
STRICT: dict[str, Parser] = {
    "label": LabelParser(),
    "rationale label": RationaleParser(LabelParser()),
}
CHOICE: dict[str, Parser] = {
    "choice": ChoiceParser(),
    "choice of words": ChoiceParser(whole_words=True),
    "rationale choice": RationaleParser(ChoiceParser(whole_words=True)),
}
LENIENT: dict[str, Parser] = {
    "choice": ChoiceParser(whole_words=True),
    "final": FinalAnswerParser(),
    "rationale choice": RationaleParser(ChoiceParser(whole_words=True)),
    "rationale final": RationaleParser(FinalAnswerParser()),
}


def read(parser: Parser, row: Row) -> str | None:
    answer = parser(Query(row.query, choices=row.choices), Completion(row.reply))
    return answer.text if answer.valid and answer.text in row.choices else None


def test_a_quarter_of_the_table_is_invalid() -> None:
    assert len(ROWS) >= 200
    assert 4 * len(WITHOUT_LABEL) >= len(ROWS)
    assert len({(row.query, row.reply) for row in EVERY_ROW}) == len(EVERY_ROW)


@pytest.mark.parametrize("name", (*STRICT, *LENIENT))
def test_the_label_that_a_person_reads_is_read(name: str) -> None:
    parser = (STRICT | LENIENT)[name]
    assert [(row, found) for row in WITH_LABEL if (found := read(parser, row)) != row.label] == []


@pytest.mark.parametrize("name", STRICT)
def test_no_label_is_read_where_a_person_reads_none(name: str) -> None:
    parser = STRICT[name]
    assert [(row, found) for row in WITHOUT_LABEL if (found := read(parser, row))] == []


# An option text may be part of a word for `ChoiceParser()`.
PART_OF_A_WORD = ("A caterpillar on a leaf", "115 cm", "catfish", "Category: mammal")


@pytest.mark.parametrize("name", CHOICE)
def test_multiple_choice_is_read_as_a_person_reads_it(name: str) -> None:
    rows = [row for row in EVERY_ROW if name != "choice" or row.reply not in PART_OF_A_WORD]
    assert len(rows) > 400
    wrong = [
        (row, found)
        for row in rows
        if (found := read(CHOICE[name], row)) != (row.choice or row.label)
    ]
    assert wrong == []
