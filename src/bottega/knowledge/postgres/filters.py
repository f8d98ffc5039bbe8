"""Filters as SQL conditions of PostgreSQL, equivalent to those of SQLite."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from bottega.errors import SettingError
from bottega.knowledge.filters import (
    CREATED,
    LABEL,
    TAG,
    TEXT_COLUMNS,
    And,
    Contains,
    Eq,
    Filter,
    FilterValue,
    In,
    Range,
)

COLUMNS = ("namespace", "source", CREATED)
LABELS = "jsonb_array_elements_text(coalesce(examples.labels, jsonb_build_array(examples.answer)))"
# Short enough for a double: PostgreSQL rejects larger and smaller numbers.
NUMBER = r"'^\s*[+-]?(\d{1,200}\.?\d{0,100}|\.\d{1,100})([eE][+-]?\d{1,2})?\s*$'"


class Parameters:
    """Parameters of a statement. `add` returns the placeholder of a value."""

    def __init__(self, *values: object) -> None:
        self.values = list(values)

    def add(self, value: object, type: str) -> str:
        self.values.append(value)
        return f"${len(self.values)}::{type}"


def to_condition(wanted: Filter, parameters: Parameters) -> str:
    """Return a WHERE condition over `examples`, and add its values."""
    match wanted:
        case And(parts):
            found = [f"({to_condition(part, parameters)})" for part in parts]
            return " AND ".join(found) or "true"
        case Eq(name, str(value)) if name.startswith(TAG):  # by the index of tags
            tag = orjson.dumps({name.removeprefix(TAG): value}).decode()
            return f"examples.tags @> {parameters.add(tag, 'jsonb')}"
        case Eq(name, value):
            return _field(name, [("=", value)], parameters)
        case In(name, values):
            return _one_of(name, values, parameters)
        case Range(name, low, high):
            ends = [(">=", low), ("<=", high)]
            return _field(name, [(s, end) for s, end in ends if end is not None], parameters)
        case Contains(text):
            wanted_text = f'lower({parameters.add(text, "text")} COLLATE "C")'
            matches = [
                f"position({wanted_text} in lower(examples.{column})) > 0"
                for column in TEXT_COLUMNS
            ]
            return f"({' OR '.join(matches)})"
    raise SettingError(
        f"filter has an unknown type, got {wanted!r}", hint="use Eq, In, Range, Contains or And"
    )


def _field(name: str, tests: list[tuple[str, FilterValue]], parameters: Parameters) -> str:
    def compare(stored: str) -> str:
        return " AND ".join(_compared(name, stored, sign, v, parameters) for sign, v in tests)

    return _stored(name, compare, parameters)


def _one_of(name: str, values: tuple[FilterValue, ...], parameters: Parameters) -> str:
    if name == CREATED:
        chosen = parameters.add([float(value) for value in values], "float8[]")
    else:
        chosen = parameters.add([str(value) for value in values], "text[]")
    return _stored(name, lambda stored: f"{stored} = ANY({chosen})", parameters)


def _stored(name: str, compare: Callable[[str], str], parameters: Parameters) -> str:
    if name in COLUMNS:
        return compare(f"examples.{name}")
    if name == LABEL:
        label = 'label COLLATE "C"'
        return f"EXISTS (SELECT 1 FROM {LABELS} AS label WHERE {compare(label)})"
    tag = parameters.add(name.removeprefix(TAG), "text")
    return compare(f'(examples.tags ->> {tag}) COLLATE "C"')


def _compared(name: str, stored: str, sign: str, value: FilterValue, parameters: Parameters) -> str:
    is_number = isinstance(value, int | float)
    if name == CREATED:
        return f"{stored} {sign} {parameters.add(float(value), 'float8')}"
    if is_number and name not in COLUMNS:  # numeric texts compare as numbers, others never match
        number = parameters.add(float(value), "float8")
        return f"CASE WHEN {stored} ~ {NUMBER} THEN ({stored})::float8 {sign} {number} END"
    return f"{stored} {sign} {parameters.add(str(value), 'text')}"
