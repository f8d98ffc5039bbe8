"""The eight benchmark sets of ManyICL: a table of one-hot labels beside a folder of images."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from bottega.errors import ImageError, LoadError
from bottega.image import Image
from bottega.knowledge.bad import OnBadRow, or_raise
from bottega.knowledge.loading.labelled import QUESTION, label_text, labelled
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
    cannot be read, and images that are missing or damaged, go to `on_bad`.
    """
    table = Path(folder) / f"{split}.csv"
    report = or_raise(on_bad)
    rows = _rows(table, report)
    multi = any(len(labels) != 1 for _, _, labels in rows)
    for line, name, labels in rows:
        source = f"{table}, line {line}"
        try:
            image = Image.open(table.parent / "images" / name)
        except ImageError as error:
            report(ImageError(f"{source}: {error}", hint=error.hint))
        else:
            yield labelled(image, labels, question=question, source=source, multi=multi)


def _rows(table: Path, on_bad: OnBadRow) -> list[Row]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines)
            classes = [label_text(name) for name in next(reader, [])[1:]]
            if not classes:
                raise LoadError(f"{table} has no class columns", hint=LAYOUT)
            found = [(reader.line_num, fields) for fields in reader if fields]
    except OSError as error:
        raise LoadError(f"{table} cannot be read: {error.strerror}", hint=LAYOUT) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"{table} is not a CSV file in UTF-8: {error}", hint=LAYOUT) from error
    rows: list[Row] = []
    for line, fields in found:
        try:
            rows.append((line, fields[0], _labels(fields[1:], classes)))
        except ValueError as error:
            on_bad(
                LoadError(
                    f"{table}, line {line}: {error}",
                    hint="a file name and one number for each class",
                )
            )
    return rows


def _labels(values: list[str], classes: list[str]) -> tuple[str, ...]:
    if len(values) != len(classes):
        raise ValueError(f"{len(values)} values for {len(classes)} classes")
    present = (name for name, value in zip(classes, values, strict=True) if float(value) > 0.5)
    return tuple(dict.fromkeys(present))
