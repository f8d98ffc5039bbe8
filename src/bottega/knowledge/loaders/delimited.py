"""Loader of tables whose rows name or contain images: CSV, TSV and Hugging Face metadata files."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TextIO

import orjson

from bottega.errors import ImageError, LoadError, OnRowError, error_handler
from bottega.image import MAX_BYTES, path_text
from bottega.knowledge.loaders.jsonl import open_lines
from bottega.knowledge.loaders.tables import Columns, Names, Row
from bottega.types import IMAGE_QUESTION, Example

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
METADATA = ("metadata.csv", "metadata.jsonl")
DELIMITERS = "\t,;|"
LAYOUT = "write a line of column names, such as image,label, and then one line for each image"
# Base64 of the largest image. The module `csv` has only a process-wide limit.
MAX_CELL = MAX_BYTES * 4 // 3 + 4
# VLMEvalKit: a cell this short is the index of another row, whose image it shares.
MAX_REFERENCE = 20

# Name for errors and the row, or the error of a row that is not readable.
SourceRow = tuple[str, Row | LoadError]


def is_delimited(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def load_table(
    path: str | Path,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    question: str = IMAGE_QUESTION,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield the rows of a CSV or TSV file (also .gz), or of a Hugging Face `metadata.jsonl`.

    Columns that are not named are found by usual names, see `load_hugging_face`. An image is base64
    or a path that must be inside the folder of the file. In VLMEvalKit's tables it may be the index
    of an earlier row. Unreadable rows go to `on_error`, which raises by default.
    """
    path = Path(path)
    report, shown = error_handler(on_error), path_text(path)
    names = column_names(path)
    given = Names(image=image_column, label=label_column)
    try:
        columns = Columns.infer(dict.fromkeys(names), given, question, path.parent)
    except LoadError as error:
        raise LoadError(f"{shown}: {error}", hint=error.hint) from error
    rows = _rows(path)
    if columns.names.image is not None and "index" in names:
        rows = _with_shared_images(path, columns.names.image)
    for source, row in rows:
        try:
            if isinstance(row, LoadError):
                raise row
            example = columns.example(row, source)
        except (LoadError, ImageError) as error:
            named = str(error) if str(error).startswith(source) else f"{source}: {error}"
            report(type(error)(named, hint=error.hint))
        else:
            yield example


def count_table(path: str | Path) -> int:
    """Return the number of rows that `load_table` reads. Raises `LoadError`."""
    return sum(1 for _ in _rows(Path(path)))


def column_names(path: Path) -> Sequence[str]:
    """Return the names of the columns. Raises `LoadError`."""
    if not is_delimited(path):
        rows = (row for _, row in _rows(path) if isinstance(row, dict))
        return list(dict.fromkeys(chain.from_iterable(rows)))
    with _reading(path) as lines:
        names = _header(lines, path)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise LoadError(f"{path_text(path)} has two columns {twice[0]!r}", hint=LAYOUT)
    return names


def _header(lines: TextIO, path: Path) -> list[str]:
    names = [name.strip() for name in next(csv.reader(lines, delimiter=_delimiter(lines)), [])]
    if not any(names):
        raise LoadError(f"{path_text(path)} has no line of column names", hint=LAYOUT)
    return names


def _delimiter(lines: TextIO) -> str:
    first = lines.readline()
    lines.seek(0)
    return max(DELIMITERS, key=first.count)


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    csv.field_size_limit(max(MAX_CELL, csv.field_size_limit()))
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
            yield lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise LoadError(
            f"{path_text(path)} cannot be read: {reason}", hint="save it as CSV in UTF-8"
        ) from error


def _rows(path: Path) -> Iterator[SourceRow]:
    return _delimited_rows(path) if is_delimited(path) else _json_rows(path)


def _delimited_rows(path: Path) -> Iterator[SourceRow]:
    with _reading(path) as lines:
        names = _header(lines, path)
        lines.seek(0)
        reader = csv.reader(lines, delimiter=_delimiter(lines))
        next(reader)
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                source = f"{path_text(path)}, line {reader.line_num}"
                yield source, LoadError(str(error), hint="give images as paths")
                continue
            if fields is None:
                return
            source = f"{path_text(path)}, line {reader.line_num}"
            if not any(fields):
                continue
            if len(fields) != len(names):
                found = f"expected {len(names)} columns, got {len(fields)}"
                yield source, LoadError(found, hint="quote texts that contain the separator")
            else:
                yield source, dict(zip(names, fields, strict=True))


def _json_rows(path: Path) -> Iterator[SourceRow]:
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            source = f"{path_text(path)}, line {number}"
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            hint = "write each object on one line"
            valid = isinstance(row, dict)
            yield source, row if valid else LoadError("not a JSON object", hint=hint)


def _with_shared_images(path: Path, image: str) -> Iterator[SourceRow]:
    """Yield the rows; an image that is the index of an earlier row becomes the image of that row.
    The file is read twice, so only the images that are shared are kept in memory."""
    shared: dict[str, object] = {}
    for _, row in _rows(path):
        if not isinstance(row, LoadError) and _is_reference(row.get(image)):
            shared[str(row.get(image))] = None
    for source, row in _rows(path):
        if isinstance(row, LoadError):
            yield source, row
            continue
        value = row.get(image)
        if _is_reference(value):
            found = shared.get(str(value))
            if found is None:
                hint = "move the row with the image before the rows that name it"
                yield source, LoadError(f"no earlier row has the index {value}", hint=hint)
                continue
            row = {**row, image: found}
        elif str(row.get("index")) in shared:
            shared[str(row["index"])] = value
        yield source, row


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REFERENCE and value.isdigit()
