"""Conditions on what an example is, as data: the store turns them into SQL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from bottega.errors import SettingError

Value = str | int | float
COLUMNS = ("namespace", "source", "created")
TAG = "tags."
LABEL = "label"
LABELS = "json_each(coalesce(examples.labels, json_array(examples.answer)))"
FIELDS = "use label, source, namespace, created (unix seconds) or tags.NAME"


@dataclass(frozen=True)
class Eq:
    """`field` has this value. An example with several labels has each of them."""

    field: str
    value: Value

    def __post_init__(self) -> None:
        _check_field(self.field)


@dataclass(frozen=True)
class In:
    """`field` has one of these values; no values, no examples."""

    field: str
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        _check_field(self.field)
        object.__setattr__(self, "values", tuple(self.values))


@dataclass(frozen=True)
class Range:
    """`low <= field <= high`; an end that is None is open. Tags and labels are texts and compared
    as such, or as numbers where the ends are numbers."""

    field: str
    low: Value | None = None
    high: Value | None = None

    def __post_init__(self) -> None:
        _check_field(self.field)
        if self.low is None and self.high is None:
            raise SettingError(f"the range of {self.field} has no end", hint="give low or high")


@dataclass(frozen=True)
class And:
    """All of the parts; without parts, every example."""

    parts: tuple[Filter, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))


Filter = Eq | In | Range | And
Sql = tuple[str, list[Value]]


def condition(wanted: Filter) -> Sql:
    """For a WHERE over `examples`, and its values."""
    match wanted:
        case And(parts):
            found = [condition(part) for part in parts]
            texts = [text for text, _ in found]
            return " AND ".join(texts) or "true", [v for _, values in found for v in values]
        case Eq(name, value):
            return _about(name, lambda stored: (f"{stored} = ?", [value]))
        case In(name, values):
            listed = orjson.dumps(values).decode()
            return _about(
                name, lambda stored: (f"{stored} IN (SELECT value FROM json_each(?))", [listed])
            )
        case Range(name, low, high):
            ends = [(">=", low), ("<=", high)]
            given = [(sign, end) for sign, end in ends if end is not None]
            return _about(name, lambda stored: _between(stored, given, name))
    raise SettingError(f"{wanted!r} is not a filter", hint="use Eq, In, Range or And")


def _between(stored: str, ends: list[tuple[str, Value]], name: str) -> Sql:
    def compared(end: Value) -> str:
        text = name.startswith(TAG) or name == LABEL
        return f"CAST({stored} AS REAL)" if text and not isinstance(end, str) else stored

    return " AND ".join(f"{compared(end)} {sign} ?" for sign, end in ends), [e for _, e in ends]


def _about(name: str, compare: Callable[[str], Sql]) -> Sql:
    if name in COLUMNS:
        return compare(f"examples.{name}")
    if name == LABEL:
        text, values = compare("value")
        return f"EXISTS (SELECT 1 FROM {LABELS} WHERE {text})", values
    tag = name.removeprefix(TAG)
    # A path is several times quicker than the table of all tags, but not every name makes one.
    if tag.isidentifier() and tag.isascii():
        return compare(f"json_extract(examples.tags, '$.{tag}')")
    text, values = compare("value")
    return (
        f"EXISTS (SELECT 1 FROM json_each(examples.tags) WHERE key = ? AND {text})",
        [tag, *values],
    )


def _check_field(name: str) -> None:
    if name not in (*COLUMNS, LABEL) and not (name.startswith(TAG) and name != TAG):
        raise SettingError(f"examples cannot be filtered by {name!r}", hint=FIELDS)
