"""Sources of `bottega add`: folders, files, data sets, published benchmarks, passages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bottega.cli.shown_progress import progress
from bottega.errors import LoadError, OnError, SettingError
from bottega.evaluation.benchmarks.loading import PUBLISHED, load_benchmark
from bottega.evaluation.benchmarks.passages import load_passages
from bottega.knowledge import (
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
    load_table,
)
from bottega.knowledge.loaders.archives import is_archive
from bottega.knowledge.loaders.delimited import (
    METADATA,
    column_names,
    count_manyicl,
    count_table,
    is_delimited,
    is_manyicl,
)
from bottega.knowledge.loaders.folders import (
    count_images,
    hub_snapshot,
    ignore_error,
)
from bottega.knowledge.loaders.jsonl import count_lines
from bottega.knowledge.loaders.scan import named_split, split_names, splits_error, subfolders
from bottega.knowledge.loaders.tables import PARQUET, count_rows
from bottega.types import Example

TRAIN = "train"
DIGITS = "digits"
FILE_NAME = "file_name"  # column of Hugging Face's metadata files
TABLES = "a .csv, .tsv, .jsonl, .jsonl.gz or .parquet file, or a .zip of class folders"


@dataclass(frozen=True)
class ExampleSource:
    """Examples to add, and their number, None if it is unknown before they are read."""

    examples: Iterator[Example]
    total: int | None


def open_source(source: str, split: str | None, on_error: OnError, **columns: str) -> ExampleSource:
    """Open labelled examples. `columns` are the parameters of `load_table`; empty ones are found by
    usual names. Raises `LoadError` and `SettingError`."""
    path = hub_snapshot(Path(source))
    source = source if path == Path(source) else str(path)
    file = _table_file(path, split)
    single = path if path.name.lower().endswith((".jsonl", ".jsonl.gz", PARQUET)) else file
    is_named = source == DIGITS or source.partition(":")[0] in PUBLISHED
    is_single = single is not None and single.is_file() and single.parent in (path, path.parent)
    if split is not None and (is_named or is_single):
        raise SettingError(
            f"{source if is_named else single} has no splits to choose from",
            hint="omit --split" + "; add reads the examples, eval the items" * is_named,
        )
    if file is not None:
        rows = load_table(file, **columns, on_error=on_error)
        return ExampleSource(rows, count_table(file))
    if source.startswith("hf:") or _has_parquet(path):
        name, part = source.removeprefix("hf:"), split or TRAIN
        rows = load_hugging_face(name, part, **columns, on_error=on_error)
        return ExampleSource(rows, count_rows(name, part))
    if any(columns.values()):
        raise SettingError(
            f"{source} is not a table", hint="omit --image-column and --label-column"
        )
    if source == DIGITS:
        digits = list(load_digits())
        return ExampleSource(iter(digits), len(digits))
    if source.partition(":")[0] in PUBLISHED:
        examples = load_benchmark(source, seed=0, on_error=on_error).knowledge
        return ExampleSource(iter(examples), len(examples))
    if not (path.exists() or is_archive(path)):
        raise LoadError(
            f"{source} does not exist",
            hint=f"pass a folder, {TABLES}, or hf:OWNER/NAME",
        )
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return ExampleSource(load_jsonl(path, on_error=on_error), count_lines(path))
    if is_manyicl(path):
        table = split or "demo"
        rows = load_manyicl(path, table, on_error=on_error)
        return ExampleSource(rows, count_manyicl(path, table))
    if not (path.is_dir() or is_archive(path)):
        raise SettingError(
            f"{source} is not a folder of classes or {TABLES}",
            hint="add --passages for data without answers; see bottega add --help",
        )
    images = load_image_folder(path, split=split, on_error=on_error)
    return ExampleSource(images, count_images(path, split))


def _table_file(path: Path, split: str | None) -> Path | None:
    """Return the file of a CSV or TSV table, or the metadata of a Hugging Face image folder."""
    if path.is_file():
        return path if is_delimited(path) or path.name in METADATA else None
    names = ("", *chain.from_iterable(split_names(subfolders(path)).values()))
    files = [path / name / file for name in names for file in reversed(METADATA)]
    tables = {
        file.parent: file for file in files if file.exists() and FILE_NAME in column_names(file)
    }
    if path in tables or not tables:
        return tables.get(path)
    splits = split_names(folder.name for folder in tables)
    if split is None:
        raise splits_error(path, splits)
    return tables[path / named_split(path, splits, split)]


def _has_parquet(path: Path) -> bool:
    """Return whether the path is a parquet file, or a folder of them such as a hub's snapshot."""
    return path.suffix.lower() == PARQUET or any(
        chain(path.glob("*.parquet"), path.glob("data/*.parquet"))
    )


def open_passages(source: str, split: str | None, on_error: OnError) -> ExampleSource:
    """Open passages without answers. Raises `LoadError` and `SettingError`."""
    if split not in (None, TRAIN):
        raise SettingError(
            f"split of passages must be {TRAIN}, got {split}",
            hint=f"use --split {TRAIN} for the training part of the Google Search corpus",
        )

    def load(on_error: OnError) -> Iterator[Example]:
        return load_passages(source, train=split == TRAIN, on_error=on_error)

    return ExampleSource(load(on_error), _count_passages(source, load))


def _count_passages(source: str, load: Callable[[OnError], Iterator[Example]]) -> int | None:
    """Return the number of passages. A table is read twice: not all of its rows are passages, and
    reading them takes much less time than embedding them."""
    path = Path(source)
    if path.suffix.lower() == ".jsonl":
        return count_lines(path)
    if not path.is_file():
        return None
    with progress("counting passages", None) as step:
        for _ in load(ignore_error):
            step(1)
        return step.done
