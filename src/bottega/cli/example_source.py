"""Sources of `bottega add`: folders, files, data sets, published benchmarks, passages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bottega.cli.progress import progress
from bottega.errors import BottegaError, LoadError, OnError, SettingError
from bottega.evaluation.benchmarks.loading import PUBLISHED, load_benchmark
from bottega.evaluation.benchmarks.passages import load_passages
from bottega.knowledge import (
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
)
from bottega.knowledge.loaders.folders import count_images, count_manyicl
from bottega.knowledge.loaders.jsonl import count_lines
from bottega.knowledge.loaders.tables import count_rows
from bottega.types import Example

TRAIN = "train"


@dataclass(frozen=True)
class ExampleSource:
    """Examples to add, and their number, None if it is unknown before they are read."""

    examples: Iterator[Example]
    total: int | None


def open_source(source: str, split: str | None, on_error: OnError) -> ExampleSource:
    """Open labelled examples. Raises `LoadError` and `SettingError`."""
    path = Path(source)
    if source == "digits":
        digits = list(load_digits())
        return ExampleSource(iter(digits), len(digits))
    if source.startswith("hf:"):
        return _table(source.removeprefix("hf:"), split, on_error)
    if source.partition(":")[0] in PUBLISHED:
        examples = load_benchmark(source, seed=0, on_error=on_error).knowledge
        return ExampleSource(iter(examples), len(examples))
    if not path.exists():
        raise LoadError(
            f"{source} does not exist",
            hint="pass a folder, a .jsonl or .parquet file, or hf:OWNER/NAME",
        )
    if path.suffix == ".jsonl":
        return ExampleSource(load_jsonl(path, on_error=on_error), count_lines(path))
    if path.suffix == ".parquet" or any(path.glob("*.parquet")):
        return _table(source, split, on_error)
    if (path / "demo.csv").exists():
        table = split or "demo"
        rows = load_manyicl(path, table, on_error=on_error)
        return ExampleSource(rows, count_manyicl(path, table))
    if not path.is_dir():
        raise SettingError(
            f"{source} is not a folder, .jsonl or .parquet file",
            hint="add --passages for data without answers; see bottega add --help",
        )
    images = load_image_folder(path, split=split, on_error=on_error)
    return ExampleSource(images, count_images(path, split))


def _table(name: str, split: str | None, on_error: OnError) -> ExampleSource:
    rows = load_hugging_face(name, split or TRAIN, on_error=on_error)
    return ExampleSource(rows, count_rows(name, split or TRAIN))


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
    if path.suffix == ".jsonl":
        return count_lines(path)
    if not path.is_file():
        return None
    with progress("counting passages", None) as step:
        for _ in load(_ignore):
            step(1)
        return step.done


def _ignore(error: BottegaError) -> None:
    """Ignore the error, which is reported when the passages are read again."""
