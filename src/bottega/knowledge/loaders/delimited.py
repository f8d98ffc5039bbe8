"""Loaders of tables whose rows name or contain images: CSV, TSV, Hugging Face metadata files, and
the tables of ManyICL."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from bottega._util.progress import plural
from bottega.errors import LoadError, OnRowError
from bottega.image import MAX_BYTES, path_text
from bottega.knowledge.loaders.folders import (
    ignore_error,
    label_text,
    labelled_example,
    open_within,
)
from bottega.knowledge.loaders.jsonl import Row, json_rows, open_lines, parse_rows
from bottega.knowledge.loaders.tables import Columns, Names
from bottega.types import IMAGE_QUESTION, Example

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
METADATA = ("metadata.csv", "metadata.jsonl")
DELIMITERS = "\t,;|"
SAVE = "save it as CSV in UTF-8, and give images as paths"
QUOTES = f"double the quotation marks inside of quoted texts; {SAVE}"
LAYOUT = "write a line of column names, such as image,label, and then one line for each image"
# Base64 of the largest image. The module `csv` has only a process-wide limit.
MAX_CELL = MAX_BYTES * 4 // 3 + 4
EXCEL_HEAD = ["sep=", ""]  # the line sep=; before the names of the columns
# VLMEvalKit: a cell this short is the index of another row, whose image it shares.
MAX_REFERENCE = 20

MANYICL_LAYOUT = "use FOLDER/demo.csv, FOLDER/test.csv and FOLDER/images/"

# Name for errors and the row, or the error of a row that is not readable.
SourceRow = tuple[str, Row | LoadError]
Line = tuple[str, list[str] | LoadError]
# Name for errors, file name, labels.
LabelledFile = tuple[str, str, tuple[str, ...]]


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
    names = column_names(path)
    given = Names(image=image_column, label=label_column)
    try:
        columns = Columns.infer(dict.fromkeys(names), given, question, path.parent)
    except LoadError as error:
        raise LoadError(f"{path_text(path)}: {error}", hint=error.hint) from error
    rows = _rows(path)
    if columns.names.image is not None and "index" in names:
        rows = _with_shared_images(path, columns.names.image)
    yield from parse_rows(rows, columns.example, on_error)


def count_table(path: str | Path) -> int:
    """Return the number of rows that `load_table` reads. Raises `LoadError`."""
    return sum(1 for _ in _rows(Path(path)))


def column_names(path: Path) -> Sequence[str]:
    """Return the names of the columns. Raises `LoadError`."""
    if not is_delimited(path):
        rows = (row for _, row in _rows(path) if isinstance(row, dict))
        return list(dict.fromkeys(chain.from_iterable(rows)))
    names = [name for name in _header(csv_rows(path, SAVE)) if name]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise LoadError(f"{path_text(path)} has two columns {twice[0]!r}", hint=LAYOUT)
    if not names:
        raise LoadError(f"{path_text(path)} has no line of column names", hint=LAYOUT)
    return names


def _header(lines: Iterator[Line]) -> list[str]:
    """Read the first line. Raises `LoadError`."""
    _, names = next(lines, ("", []))
    if isinstance(names, LoadError):
        raise names
    return [name.strip() for name in names]


def csv_rows(path: Path, hint: str, delimiters: str = DELIMITERS) -> Iterator[Line]:
    """Yield each line that is not empty, or its error, with its name. The delimiter is the most
    frequent one in the first line. Raises `LoadError` with the hint."""
    csv.field_size_limit(max(MAX_CELL, csv.field_size_limit()))
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            delimiter = max(delimiters, key=first.count)
            reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
            row: list[str] | LoadError | None = []
            while row is not None:
                start = reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    row = LoadError(f"{error}, in the row that begins in line {start}", hint=QUOTES)
                if row and row != EXCEL_HEAD:
                    yield f"{path_text(path)}, line {reader.line_num}", row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LoadError(f"{path_text(path)} cannot be read: {reason}", hint=hint) from error


def _rows(path: Path) -> Iterator[SourceRow]:
    if not is_delimited(path):
        with open_lines(path) as lines:
            yield from json_rows(lines, path_text(path))
        return
    found = csv_rows(path, SAVE)
    names = _header(found)
    named = max((place for place, name in enumerate(names, 1) if name), default=0)
    for source, fields in found:
        if isinstance(fields, LoadError):
            yield source, fields
        elif any(fields) and (len(fields) < named or any(fields[len(names) :])):
            expected = f"expected {plural(len(names), 'column')}, got {len(fields)}"
            yield source, LoadError(expected, hint="quote texts that contain the separator")
        elif any(fields):
            yield source, dict(zip(names, map(str.strip, fields), strict=False))


def _with_shared_images(path: Path, image: str) -> Iterator[SourceRow]:
    """Yield the rows; an image that is the index of an earlier row becomes the image of that row.
    The file is read twice, so only the images that are shared are kept in memory."""
    values = (row.get(image) for _, row in _rows(path) if not isinstance(row, LoadError))
    shared: dict[object, object] = dict.fromkeys(filter(_is_reference, values))
    hint = "move the row with the image before the rows that name it"
    for source, row in _rows(path):
        if not isinstance(row, LoadError):
            value, index = row.get(image), str(row.get("index"))
            if not _is_reference(value):
                shared |= {index: value} if index in shared else {}
            elif shared[value] is not None:
                row = {**row, image: shared[value]}
            else:
                row = LoadError(f"no earlier row has the index {value}", hint=hint)
        yield source, row


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REFERENCE and value.isdigit()


def load_manyicl(
    folder: str | Path,
    split: str = "demo",
    *,
    question: str = IMAGE_QUESTION,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield the rows of FOLDER/demo.csv or FOLDER/test.csv in order.

    If any row has several labels, or none, the whole table is multi-label. Unreadable rows, and
    images that are missing, damaged or outside of FOLDER/images, go to `on_error`, which raises by
    default.
    """
    rows = _labelled_files(Path(folder) / f"{split}.csv", on_error)
    multi = any(len(labels) != 1 for _, _, labels in rows)

    def example(row: LabelledFile, source: str) -> Example:
        image = open_within(Path(folder) / "images", row[1])
        return labelled_example(image, row[2], question=question, source=source, multi=multi)

    yield from parse_rows(((row[0], row) for row in rows), example, on_error)


def count_manyicl(folder: str | Path, split: str = "demo") -> int:
    """Return the number of rows that `load_manyicl` reads. Raises `LoadError`."""
    return len(_labelled_files(Path(folder) / f"{split}.csv", ignore_error))


def is_manyicl(folder: Path) -> bool:
    """Return whether a folder has images and rows of `demo.csv` in the layout of ManyICL. Raises
    `LoadError`."""
    has_images = (folder / "images").is_dir() and (folder / "demo.csv").exists()
    return has_images and count_manyicl(folder) > 0


def manyicl_classes(folder: str | Path, split: str = "demo") -> list[str]:
    """Return the class columns of FOLDER/demo.csv in their order. Raises `LoadError`."""
    table = Path(folder) / f"{split}.csv"
    return _classes(table, csv_rows(table, MANYICL_LAYOUT, ","))


def _classes(table: Path, lines: Iterator[Line]) -> list[str]:
    names = _header(lines)[1:]
    if not names or not all(names):
        raise LoadError(
            f"{path_text(table)} has no class columns or an unnamed one", hint=MANYICL_LAYOUT
        )
    try:
        return [label_text(name) for name in names]
    except LoadError as error:
        raise LoadError(f"{path_text(table)}: {error}", hint=error.hint) from error


def _labelled_files(table: Path, on_error: OnRowError | None) -> list[LabelledFile]:
    lines = csv_rows(table, MANYICL_LAYOUT, ",")
    classes = _classes(table, lines)

    def labelled(fields: list[str], source: str) -> LabelledFile:
        try:
            return source, fields[0], _labels(fields[1:], classes)
        except ValueError as error:
            raise LoadError(str(error), hint="give a file name and one number per class") from error

    return list(parse_rows(lines, labelled, on_error))


def _labels(values: list[str], classes: list[str]) -> tuple[str, ...]:
    if len(values) != len(classes):
        raise ValueError(f"expected {len(classes)} class values, got {len(values)}")
    numbers = [float(value) for value in values]
    # NaN > 0.5 is false: a missing value would mean "not in this class".
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"class values must be 0 or 1, got {', '.join(values)}")
    present = (name for name, number in zip(classes, numbers, strict=True) if number > 0.5)
    return tuple(dict.fromkeys(present))
