"""Reader of TOML settings into dataclasses, validated by pydantic.

A settings class is a dataclass whose field types carry their limits, such as `PositiveInt` or
`Annotated[float, Field(ge=0, le=1)]`. Every error names the file, the key path, the value and what
is allowed. Text values appear in errors only where a fixed list of words is allowed: any other
text may be a secret.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from bottega.errors import SettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")
Table = Mapping[str, object]

MAX_TEXT = 40
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# TOML has arrays, not tuples, and no paths.
TextList = Annotated[tuple[str, ...], Field(strict=False)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]

TYPE_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
# pydantic's error type: what is allowed, and an example.
EXPECTED = {
    "string_type": ("text", '"..."'),
    "path_type": ("text", '"..."'),
    "int_type": ("a whole number", "1"),
    "float_type": ("a number", "0.5"),
    "bool_type": ("true or false", "true"),
    "tuple_type": ("a list", "[...]"),
    "dict_type": ("a table", "{ ... }"),
    "finite_number": ("a finite number", "1.0"),
}
NUMBERS = ("int_type", "float_type")
NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
# pydantic's error type: the words for the limit, and the limit's name in the error's context.
LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class SettingPath:
    """Position of a setting, such as the key `tiers.master.timeout` of a file."""

    file: str = ""
    key: str = ""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    def __truediv__(self, name: str) -> SettingPath:
        return SettingPath(self.file, f"{self.key}.{name}" if self.key else name)

    def error(self, problem: str, *, hint: str) -> SettingError:
        message = f"{self.key or 'the file'} {problem}"
        return SettingError(f"{self.file}: {message}" if self.file else message, hint=hint)


def one_of(*words: str) -> AfterValidator:
    """Return a validator for text that must be one of these words. A `Literal` type does the same
    where the words are constants."""

    def check(value: str) -> str:
        if value not in words:
            expected = ", ".join(f"'{word}'" for word in words)
            raise PydanticCustomError("literal_error", "unknown word", {"expected": expected})
        return value

    return AfterValidator(check)


def read_toml(file: Path, *, hint: str) -> dict[str, Any]:
    """Parse a TOML file. Raises `SettingError`."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{file} cannot be read: {reason}", hint=hint) from error
    return parse_toml(text, str(file), hint=hint)


def parse_toml(text: str, file: str, *, hint: str) -> dict[str, Any]:
    """Parse TOML text. Raises `SettingError`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{file} is not valid TOML: {error}", hint=hint) from error


def read_settings(
    kind: type[SettingsT], table: object, path: SettingPath, *, missing: str = "", **fixed: object
) -> SettingsT:
    """Return the dataclass `kind` from a table. Fields without a value keep their defaults. The
    table cannot contain the `fixed` fields. `missing` is the hint for a field that has neither a
    value nor a default. Raises `SettingError`."""
    entries = as_table(table, path)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in fixed]
    check_names(entries, names, path)
    for field in dataclasses.fields(kind):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in {**entries, **fixed}:
            raise (path / field.name).error("is missing", hint=missing or f"set {field.name}")
    values = {name: _validate(kind, name, value, path / name) for name, value in entries.items()}
    return kind(**values, **fixed)


def check_settings(settings: DataclassInstance) -> None:
    """Check the fields of a settings object that was made in Python, for `__post_init__`. Raises
    `SettingError`."""
    for name in _validators(type(settings)):
        _validate(type(settings), name, getattr(settings, name), SettingPath() / name)


def as_table(value: object, path: SettingPath) -> Table:
    """Return the value if it is a table. Raises `SettingError`."""
    if not isinstance(value, dict):
        raise path.error(
            f"must be a table, got {_describe(value)}",
            hint=f"write [{path.key}] and its settings on the lines below",
        )
    return value


def check_names(entries: Iterable[str], allowed: Iterable[str], path: SettingPath) -> None:
    """Raise `SettingError` for a name that is not allowed, with the nearest allowed one."""
    names = list(allowed)
    for name in entries:
        if name not in names:
            raise (path / name).error("is not a setting", hint=_nearest(name, names))


@cache
def _validators(kind: type) -> Mapping[str, TypeAdapter[Any]]:
    """Return a validator for each field, except for fields that hold other dataclasses."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: TypeAdapter(hint, config=STRICT)
        for name, hint in hints.items()
        if not dataclasses.is_dataclass(hint)
    }


def _validate(kind: type, name: str, value: object, path: SettingPath) -> Any:
    try:
        return _validators(kind)[name].validate_python(value)
    except ValidationError as error:
        raise _setting_error(error.errors()[0], path) from None  # its text repeats the value


def _setting_error(error: ErrorDetails, path: SettingPath) -> SettingError:
    kind, context, got = error["type"], error.get("ctx", {}), error["input"]
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", context["expected"])
        shown = f"'{got[:MAX_TEXT]}'" if isinstance(got, str) else _describe(got)
        problem = f"must be one of {', '.join(words)}, got {shown}"
        return path.error(problem, hint=_nearest(str(got), words))
    if kind in LIMITS:
        comparison, limit = LIMITS[kind][0], context[LIMITS[kind][1]]
        if kind == "greater_than" and isinstance(limit, int):
            comparison, limit = "at least", limit + 1
        example = f"{limit:g}" if isinstance(limit, float) else str(limit)
        allowed = f"{comparison} {example}"
    else:
        allowed, example = EXPECTED[kind]
    described = _describe(got)
    if kind in NUMBERS and isinstance(got, str) and NUMBER.fullmatch(got):  # no secret
        described, example = f"the text '{got}'", got
    problem = f"must be {allowed}, got {described}"
    if error["loc"]:
        at = error["loc"][0]
        if isinstance(at, str):
            return (path / at).error(problem, hint=f"write {at} = {example}")
        problem, example = f"item {at + 1} {problem}", f"[{example}]"
    if kind == "greater_than" and isinstance(
        context["gt"], float
    ):  # the limit itself is not allowed
        return path.error(problem, hint=f"set {path.name} above {example}")
    return path.error(problem, hint=f"write {path.name} = {example}")


def _describe(value: object) -> str:
    """Return a number or boolean as in TOML; of other values only the type, since text may be a
    secret."""
    if isinstance(value, int | float):
        return repr(value).lower()[:MAX_TEXT]
    return TYPE_NAMES.get(type(value), type(value).__name__)


def _nearest(name: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
