"""The eight benchmark sets of ManyICL: a table of one-hot labels beside a folder of images."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from bottega.errors import ImageError, LoadError
from bottega.image import path_text
from bottega.knowledge.bad import OnBadRow, or_raise
from bottega.knowledge.loading.labelled import QUESTION, label_text, labelled, open_within
from bottega.types import Example

LAYOUT = "expected are FOLDER/demo.csv, FOLDER/test.csv and FOLDER/images/"

# Line number, file name, labels.
Row = tuple[int, str, tuple[str, ...]]


def load_manyicl(
    folder: str | Path,
    split: str = "demo",
    *,
    question: str = QUESTION,
    on_bad: OnBadRow | None = None,
) -> Iterator[Example]:
    """The rows of FOLDER/demo.csv or FOLDER/test.csv, in their order.

    A table with a row of several labels, or of none, is multi-label throughout. Rows that
    cannot be read, and images that are missing, damaged or outside of FOLDER/images, go to
    `on_bad`, which raises unless it is given.
    """
    table = Path(folder) / f"{split}.csv"
    report = or_raise(on_bad)
    rows = _rows(table, report)
    multi = any(len(labels) != 1 for _, _, labels in rows)
    for line, name, labels in rows:
        source = f"{path_text(table)}, line {line}"
        try:
            image = open_within(table.parent / "images", name)
        except ImageError as error:
            report(ImageError(f"{source}: {error}", hint=error.hint))
        else:
            yield labelled(image, labels, question=question, source=source, multi=multi)


def _rows(table: Path, on_bad: OnBadRow) -> list[Row]:
    shown = path_text(table)
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines)
            names = next(reader, [])[1:]
            found = [(reader.line_num, fields) for fields in reader if fields]
    except OSError as error:
        raise LoadError(f"{shown} cannot be read: {error.strerror}", hint=LAYOUT) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"{shown} is not a CSV file in UTF-8: {error}", hint=LAYOUT) from error
    if not names or not all(map(str.strip, names)):
        raise LoadError(f"{shown} has no class columns, or one without a name", hint=LAYOUT)
    classes = [label_text(name) for name in names]
    rows: list[Row] = []
    for line, fields in found:
        try:
            rows.append((line, fields[0], _labels(fields[1:], classes)))
        except ValueError as error:
            on_bad(
                LoadError(
                    f"{shown}, line {line}: {error}",
                    hint="a file name and one number for each class",
                )
            )
    return rows


def _labels(values: list[str], classes: list[str]) -> tuple[str, ...]:
    if len(values) != len(classes):
        raise ValueError(f"{len(values)} values for {len(classes)} classes")
    numbers = [_number(value) for value in values]
    present = (name for name, number in zip(classes, numbers, strict=True) if number > 0.5)
    return tuple(dict.fromkeys(present))


def _number(value: str) -> float:
    number = float(value)
    # Compared with 0.5, a missing value would look like "not of this class".
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is neither 0 nor 1")
    return number
