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
    """Reply of one kind of model; `label` is None if a person would read no label in it."""

    model: str
    query: str
    choices: tuple[str, ...]
    reply: str
    label: str | None


def read_table() -> list[Row]:
    lines = Path(__file__).with_name("replies.jsonl").read_text("utf-8").splitlines()
    table = [Row(**json.loads(line)) for line in lines]
    return [Row(r.model, r.query, tuple(r.choices), r.reply, r.label) for r in table]


ROWS = read_table()
WITH_LABEL = [row for row in ROWS if row.label is not None]
WITHOUT_LABEL = [row for row in ROWS if row.label is None]
STRICT: dict[str, Parser] = {
    "label": LabelParser(),
    "rationale label": RationaleParser(LabelParser()),
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
    assert len({(row.query, row.reply) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", (*STRICT, *LENIENT))
def test_the_label_that_a_person_reads_is_read(name: str) -> None:
    parser = (STRICT | LENIENT)[name]
    assert [(row, found) for row in WITH_LABEL if (found := read(parser, row)) != row.label] == []


@pytest.mark.parametrize("name", STRICT)
def test_no_label_is_read_where_a_person_reads_none(name: str) -> None:
    parser = STRICT[name]
    assert [(row, found) for row in WITHOUT_LABEL if (found := read(parser, row))] == []
