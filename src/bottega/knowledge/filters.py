"""Filters on examples as data; the row store converts them to SQL."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TypeGuard

from bottega.errors import SettingError
from bottega.knowledge.records import is_text

FilterValue = str | int | float
CREATED = "created"
COLUMNS = ("namespace", "source", CREATED)
TEXT_COLUMNS = ("question", "answer")
MAX_NUMBER = 2**63
MAX_PARTS = 500  # SQLite allows an expression depth of 1,000, and each part adds one level
TAG = "tags."
LABEL = "label"
FIELDS = "use label, source, namespace, created (unix seconds) or tags.NAME"


@dataclass(frozen=True)
class Eq:
    """Match examples whose `field` has this value. An example with several labels has each of them;
    labels and tags are texts."""

    field: str
    value: FilterValue

    def __post_init__(self) -> None:
        _check_field(self.field)
        _check_equal(self.field, self.value)
        object.__setattr__(self, "value", _plain(self.value))


@dataclass(frozen=True)
class In:
    """Match examples whose `field` has one of these values; an empty list matches nothing."""

    field: str
    values: tuple[FilterValue, ...]

    def __post_init__(self) -> None:
        _check_field(self.field)
        if isinstance(self.values, str):  # its letters would become the values
            raise SettingError(
                f"In requires a sequence of values, got {self.values!a}",
                hint="use Eq for one value",
            )
        for value in self.values:
            _check_equal(self.field, value)
        object.__setattr__(self, "values", tuple(map(_plain, self.values)))


@dataclass(frozen=True)
class Range:
    """Match `low <= field <= high`; None leaves an end open.

    Tags and labels compare as texts, or as numbers if the ends are numbers; then only numeric texts
    match.
    """

    field: str
    low: FilterValue | None = None
    high: FilterValue | None = None

    def __post_init__(self) -> None:
        _check_field(self.field)
        if self.low is None and self.high is None:
            raise SettingError(f"the range of {self.field} has no bound", hint="give low or high")
        for end in (self.low, self.high):
            if end is not None:
                _check_value(self.field, end)
        object.__setattr__(self, "low", _plain(self.low))
        object.__setattr__(self, "high", _plain(self.high))


@dataclass(frozen=True)
class Contains:
    """Match examples whose question or answer contains the text, ignoring the case of ASCII
    letters."""

    text: str

    def __post_init__(self) -> None:
        if not is_text(self.text):
            raise SettingError(
                f"Contains requires a text without NULs, got {self.text!a}",
                hint="use a text without NULs",
            )
        object.__setattr__(self, "text", _plain(self.text))


@dataclass(frozen=True)
class And:
    """Match examples that satisfy all parts; without parts, every example."""

    parts: tuple[Filter, ...] = field(default=())

    def __post_init__(self) -> None:
        # Flattened here, so deep nesting never recurses.
        nested = (part.parts if isinstance(part, And) else (part,) for part in self.parts)
        parts = tuple(chain.from_iterable(nested))
        if len(parts) > MAX_PARTS:
            raise SettingError(
                f"And takes up to {MAX_PARTS} conditions, got {len(parts)}",
                hint="use In for one of many values",
            )
        object.__setattr__(self, "parts", parts)


Filter = Eq | In | Range | Contains | And


def is_text_field(name: str) -> bool:
    return name.startswith(TAG) or name == LABEL


def _check_equal(name: str, value: FilterValue) -> None:
    _check_value(name, value)
    if is_text_field(name):
        _check_text(name, value)


def _check_text(name: str, value: FilterValue) -> None:
    if not isinstance(value, str):
        raise SettingError(
            f"{name} must be compared with a text, got {value!r}", hint=f"use '{value!r}'"
        )


def _check_value(name: str, value: FilterValue) -> None:
    if name in COLUMNS and name != CREATED:
        _check_text(name, value)
    if name == CREATED and not _is_number(value):
        raise SettingError(
            f"{CREATED} must be compared with a number, got {value!a}",
            hint="give seconds since 1970, such as datetime(2026, 1, 1).timestamp()",
        )
    if is_text(value):
        return
    if not _is_number(value) or not abs(value) < MAX_NUMBER:
        raise SettingError(
            f"{name} must be compared with a text or a number below 2^63, got {value!a}",
            hint="use a shorter number or a text without NULs",
        )


def _plain(value: FilterValue | None) -> FilterValue | None:
    """Return the text of a subclass of `str`, such as a member of an enumeration, whose `str()` is
    its name."""
    return str.__str__(value) if isinstance(value, str) else value


def _is_number(value: FilterValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_field(name: str) -> None:
    if not is_text(name):
        raise SettingError(f"filter field is unknown, got {name!a}", hint=FIELDS)
    if name not in (*COLUMNS, LABEL) and not (name.startswith(TAG) and name != TAG):
        raise SettingError(f"filter field is unknown, got {name!r}", hint=FIELDS)
