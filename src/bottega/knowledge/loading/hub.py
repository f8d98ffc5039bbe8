"""Data sets in the Hugging Face layout: by hub id, or from parquet files on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.errors import BottegaError, ImageError, LoadError, MissingDependencyError
from bottega.image import path_text
from bottega.knowledge.bad import OnBadRow, or_raise
from bottega.knowledge.loading.columns import Columns, Names, Row
from bottega.knowledge.loading.labelled import QUESTION
from bottega.types import Example

if TYPE_CHECKING:
    import datasets

PARQUET = ".parquet"


def load_hugging_face(
    id_or_path: str | Path,
    split: str = "train",
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    question: str = QUESTION,
    on_bad: OnBadRow | None = None,
) -> Iterator[Example]:
    """A hub id, a folder with parquet files, or one parquet file. Rows are streamed.

    Columns that are not named are guessed from their types and usual names. An answer column
    outweighs a label column; of several answers the most frequent counts (the first of a tie), of
    SQuAD's spellings the first; a list of labels is multi-label. Images that are paths must lie
    in the folder, or in that of the parquet file. Rows that cannot be read go to `on_bad`,
    which raises unless it is given.
    """
    report = or_raise(on_bad)
    name = str(id_or_path)
    given = Names(image_column, label_column, question_column, answer_column)
    with _loading(name):
        stream = _stream(name, split)
        columns = Columns.guessed(stream.features or {}, given, question, _folder(Path(name)))
        rows = _rows(stream, columns)
    number = 0
    while (row := _next(rows, name)) is not None:
        source = f"{path_text(name)}, {split}, row {number}"
        number += 1
        try:
            example = columns.example(row, source)
        except (LoadError, ImageError) as error:
            report(LoadError(f"{source}: {error}", hint=error.hint))
        else:
            yield example


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "datasets", "eval") from error
    except BottegaError:
        raise
    except Exception as error:  # datasets, pyarrow, the hub's client: each has its own tree
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{path_text(name)} cannot be loaded: {reason}",
            hint="check the name, the split and the network, or give a folder of parquet files",
        ) from error


def _stream(name: str, split: str) -> datasets.IterableDataset:
    import datasets

    path = Path(name)
    if path.suffix == PARQUET and path.is_file():
        files = {split: name}
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=True)
    if path.is_absolute() and not path.exists():
        raise LoadError(f"{path_text(name)} does not exist", hint="check the path")
    return datasets.load_dataset(name, split=split, streaming=True)


def _folder(path: Path) -> Path | None:
    """Where images that are paths may lie; a data set on the hub has no such place here."""
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None


def _rows(stream: datasets.IterableDataset, columns: Columns) -> Iterator[Row]:
    import datasets

    image = columns.names.image
    if image is not None and isinstance(stream.features[image], datasets.Image):
        # The bytes as they are: decoding and encoding again would change the picture's hash.
        stream = stream.cast_column(image, datasets.Image(decode=False))
    return iter(stream)


def _next(rows: Iterator[Row], name: str) -> Row | None:
    with _loading(name):
        return next(rows, None)
