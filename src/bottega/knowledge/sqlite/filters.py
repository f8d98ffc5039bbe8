"""Filters as SQL conditions of SQLite."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from bottega.errors import SettingError
from bottega.knowledge.filters import (
    COLUMNS,
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
    is_text_field,
)

LABELS = "json_each(coalesce(examples.labels, json_array(examples.answer)))"
Sql = tuple[str, list[FilterValue]]


def to_sql(wanted: Filter) -> Sql:
    """Return a WHERE condition over `examples` and its values."""
    match wanted:
        case And(parts):
            found = [to_sql(part) for part in parts]
            texts = [f"({text})" for text, _ in found]
            return " AND ".join(texts) or "true", [v for _, values in found for v in values]
        case Eq(name, value):
            return _field_sql(name, lambda stored: (f"{stored} = ?", [value]))
        case In(name, values):
            listed = orjson.dumps(values, default=float).decode()  # such as NumPy's
            return _field_sql(
                name, lambda stored: (f"{stored} IN (SELECT value FROM json_each(?))", [listed])
            )
        case Range(name, low, high):
            ends = [(">=", low), ("<=", high)]
            given = [(sign, end) for sign, end in ends if end is not None]
            return _field_sql(name, lambda stored: _range_sql(stored, given, name))
        case Contains(text):
            matches = [f"instr(lower(examples.{column}), lower(?))" for column in TEXT_COLUMNS]
            return f"({' OR '.join(matches)})", [text] * len(matches)
    raise SettingError(
        f"filter has an unknown type, got {wanted!r}", hint="use Eq, In, Range, Contains or And"
    )


def _range_sql(stored: str, ends: list[tuple[str, FilterValue]], name: str) -> Sql:
    def compared(sign: str, end: FilterValue) -> str:
        if not is_text_field(name) or isinstance(end, str):
            return f"{stored} {sign} ?"
        # A CAST gives the other side its numeric affinity: numeric texts compare as numbers,
        # and any other text sorts after all numbers.
        return f"{stored} {sign} CAST(? AS REAL) AND {stored} <= CAST(9e999 AS REAL)"

    return " AND ".join(compared(sign, end) for sign, end in ends), [e for _, e in ends]


def _field_sql(name: str, compare: Callable[[str], Sql]) -> Sql:
    if name in COLUMNS:
        return compare(f"examples.{name}")
    if name == LABEL:
        text, values = compare("value")
        return f"EXISTS (SELECT 1 FROM {LABELS} WHERE {text})", values
    tag = name.removeprefix(TAG)
    # A JSON path is several times faster than json_each, but not every name is a valid path.
    if tag.isidentifier() and tag.isascii():
        return compare(f"json_extract(examples.tags, '$.{tag}')")
    text, values = compare("value")
    return (
        f"EXISTS (SELECT 1 FROM json_each(examples.tags) WHERE key = ? AND {text})",
        [tag, *values],
    )
