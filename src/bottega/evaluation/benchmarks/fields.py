"""The fields of a published table's row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import ascii_uppercase

from bottega.errors import ImageError, LoadError
from bottega.image import Image
from bottega.knowledge.loading.labelled import open_within

Row = Mapping[str, object]

UNUSABLE = "the file is damaged, or is not that of this benchmark"


def text(row: Row, name: str) -> str:
    """The field's text, without what surrounds it; empty if there is none."""
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise _wrong(name, "a text", value)
    return str(value).strip()


def needed(row: Row, name: str) -> str:
    value = text(row, name)
    if not value:
        raise LoadError(f"there is no {name}", hint=UNUSABLE)
    return value


def texts(row: Row, name: str) -> tuple[str, ...]:
    value = row.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(part, str | int | float) for part in value
    ):
        raise _wrong(name, "a list of texts", value)
    return tuple(str(part).strip() for part in value)


def option(choices: tuple[str, ...], index: object) -> str:
    """The right one of the choices."""
    if isinstance(index, int) and 0 <= index < len(choices):
        return choices[index]
    raise LoadError(f"the answer is none of the {len(choices)} choices", hint=UNUSABLE)


def by_letter(choices: tuple[str, ...], letter: str) -> str:
    return option(choices, ascii_uppercase.find(letter) if len(letter) == 1 else None)


def image(value: object, place: str, source: str) -> Image:
    """Encoded bytes, as tables hold them, or a path inside of the folder."""
    match value:
        case bytes(data) | {"bytes": bytes(data)}:
            return Image.from_bytes(data, source=source)
        case str(path) | {"path": str(path)} if Path(place).is_dir():
            return open_within(Path(place), path)
    raise ImageError(f"{type(value).__name__} is not an image", hint=UNUSABLE)


def _wrong(name: str, wanted: str, value: object) -> LoadError:
    return LoadError(f"{name} should be {wanted}, not {type(value).__name__}", hint=UNUSABLE)
