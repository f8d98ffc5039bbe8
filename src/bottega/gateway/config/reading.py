"""One TOML table into one frozen dataclass, strictly: what nobody reads is refused.

A field's type says what may stand there and `within` or `one_of` which values make sense. Errors
name the file and the key, never the value: it may be a secret that was pasted into the wrong line.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from bottega.errors import SettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Read = TypeVar("Read", bound="DataclassInstance")
Table = Mapping[str, object]

# Narrower than what errors are searched for: a model may well be called `key-frames`.
SECRET = re.compile(
    r"\b(?:sk[-_]|gsk_|xai-|hf_|gh[pos]_|AIza|AKIA|eyJ)[A-Za-z0-9*_-]{12,}"
    r"|\b[Bb]earer\s+\S{8,}|://[^/@\s]+@"
)
NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
EXAMPLES: dict[type, str] = {str: '"..."', int: "1", float: "0.5", bool: "true"}


@dataclass(frozen=True)
class Place:
    """Where something stands: `tiers.master.timeout` of a file."""

    file: str
    key: str = ""

    def __truediv__(self, name: str) -> Place:
        return Place(self.file, f"{self.key}.{name}" if self.key else name)

    def error(self, what: str, *, hint: str) -> SettingError:
        return SettingError(f"{self.file}: {self.key or 'the file'} {what}", hint=hint)


def within(
    default: Any, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Any:
    """A number from `low` to `high`, and more than `above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def one_of(default: Any, *words: str) -> Any:
    return field(default=default, metadata={"words": words})


def read(kind: type[Read], table: object, at: Place, **told: object) -> Read:
    """The dataclass `kind` from a table: fields that are not given keep their defaults. What is
    `told` the table cannot say."""
    given = as_table(table, at)
    hints = get_type_hints(kind)
    known = {one.name: one for one in dataclasses.fields(kind) if one.name not in told}
    check_known(given, known, at)
    values = dict(told)
    for name, value in given.items():
        values[name] = _converted(value, hints[name], at / name)
        _check_value(values[name], known[name].metadata, at / name)
    return kind(**values)


def as_table(value: object, at: Place) -> Table:
    if not isinstance(value, dict):
        last = at.key.rpartition(".")[2]
        raise at.error("is not a table", hint=f"write [{at.key}] and its settings below: {last}")
    return value


def check_known(given: Iterable[str], known: Iterable[str], at: Place) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise (at / name).error("is not a setting", hint=meant(name, names))


def meant(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def refuse_secrets(value: object, at: Place) -> None:
    """Files are copied, shown and committed: keys come from the environment."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "api_key":
                raise (at / name).error("would hold a secret", hint=_instead(at))
            refuse_secrets(inner, at / str(name))
    elif isinstance(value, list):
        for inner in value:
            refuse_secrets(inner, at)
    elif isinstance(value, str) and SECRET.search(value):
        raise at.error("looks like a secret", hint=_instead(at))


def _instead(at: Place) -> str:
    return (
        'put it into an environment variable and write its name: api_key_env = "MASTER_KEY";'
        " what was in a file should be replaced by a new key"
    )


def _converted(value: object, kind: Any, at: Place) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):  # TOML has no null: what is there is not None
        [kind] = [one for one in get_args(kind) if one is not NoneType]
        return _converted(value, kind, at)
    if origin is tuple:
        return _row(value, get_args(kind)[0], at)
    if origin is Mapping:
        return as_table(value, at)
    if origin is Literal:
        _check_value(_plain(value, str, at), {"words": get_args(kind)}, at)
        return value
    if kind is Path:
        return Path(_plain(value, str, at)).expanduser()
    return _plain(value, kind, at)


def _row(value: object, kind: Any, at: Place) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise at.error("is not a list", hint=f"write {at.key.rpartition('.')[2]} = [...]")
    return tuple(_converted(one, kind, at) for one in value)


def _plain(value: object, kind: type, at: Place) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise at.error("is out of range", hint="use a smaller number") from error
    if type(value) is not kind:  # True is an int to isinstance
        raise at.error(
            f"is {NAMES.get(type(value), type(value).__name__)}, not {NAMES[kind]}",
            hint=f"write {at.key.rpartition('.')[2]} = {EXAMPLES[kind]}",
        )
    return value


def _check_value(value: Any, rule: Mapping[str, Any], at: Place) -> None:
    if words := rule.get("words"):
        for word in value if isinstance(value, tuple) else (value,):
            if word not in words:
                raise at.error(f"is not one of {', '.join(words)}", hint=meant(word, words))
    if "low" in rule:
        low, high, above = rule["low"], rule["high"], rule["above"]
        for number in value if isinstance(value, tuple) else (value,):
            if not (low <= number <= high and number > above and math.isfinite(number)):
                raise at.error("is out of range", hint=f"use {_range(low, high, above)}")


def _range(low: float, high: float, above: float) -> str:
    least = f"more than {above:g}" if above > -math.inf else f"{low:g} or more"
    return least if high == math.inf else f"{least}, at most {high:g}"
