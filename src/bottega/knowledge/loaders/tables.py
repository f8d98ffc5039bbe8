"""Loader of tables: Hugging Face data sets and parquet files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bottega.errors import (
    BottegaError,
    ImageError,
    LoadError,
    OnRowError,
    error_handler,
    needs_extra,
)
from bottega.image import Image, path_text
from bottega.knowledge.loaders.folders import join_labels, label_text, open_within
from bottega.types import IMAGE_QUESTION, Example, Query

if TYPE_CHECKING:
    import datasets


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Convert every error while reading `name` to one of Bottega."""
    try:
        with needs_extra("eval"):
            yield
    except BottegaError:
        raise
    except Exception as error:  # datasets, pyarrow and the hub's client have separate error trees
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{path_text(name)} cannot be loaded: {reason}",
            hint="check the name, the split and the network, or give a folder of parquet files",
        ) from error


def image_of_cell(value: object, folder: Path | None, source: str, *, hint: str) -> Image:
    """Return the image of a table cell: encoded bytes, or a path inside the folder. Raises
    `ImageError` with the hint."""
    match value:
        case bytes(data) | {"bytes": bytes(data)}:
            return Image.from_bytes(data, source=source)
        case str(path) | {"path": str(path)} if folder is not None:
            return open_within(folder, path)
    raise ImageError(
        f"{source}: image must be bytes or a path, got {type(value).__name__}", hint=hint
    )


IMAGE_NAMES = ("image", "img", "picture", "decoded_image")
LABEL_NAMES = ("label", "labels", "class", "category", "fine_label")
QUESTION_NAMES = ("question", "query", "prompt")
ANSWER_NAMES = ("answer", "answers", "multiple_choice_answer")

COLUMN_HINT = "name the column of encoded images with image_column"

Row = Mapping[str, object]
# Column names -> feature types of `datasets`.
Features = Mapping[str, object]


@dataclass(frozen=True)
class Names:
    """Names of the columns; None for a column that is absent or to be inferred."""

    image: str | None = None
    label: str | None = None
    question: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Columns:
    """Columns of a table and how to read them. `classes` are the names of a numeric label column,
    if it has any. Image paths are read only from `folder`."""

    names: Names
    classes: tuple[str, ...]
    question: str
    folder: Path | None

    @classmethod
    def infer(cls, features: Features, given: Names, question: str, folder: Path | None) -> Self:
        """Return the columns, inferring those that are not given from types and usual names."""
        typed = (name for name, kind in features.items() if type(kind).__name__ == "Image")
        with_classes = (name for name, kind in features.items() if _classes(kind))
        names = Names(
            given.image or next(typed, None) or _named(features, IMAGE_NAMES),
            given.label or _named(features, LABEL_NAMES) or next(with_classes, None),
            given.question or _named(features, QUESTION_NAMES),
            given.answer or _named(features, ANSWER_NAMES),
        )
        _check(names, features)
        return cls(names, _classes(features.get(names.label or "")), question, folder)

    def example(self, row: Row, source: str) -> Example:
        names = self.names
        value = None if names.image is None else row[names.image]
        images = (
            () if value is None else (image_of_cell(value, self.folder, source, hint=COLUMN_HINT),)
        )
        text = None if names.question is None else row[names.question]
        query = Query(self.question if text is None else str(text), images)
        if names.answer is not None:
            return Example(query, _answer(row[names.answer]), source=source)
        value = row[names.label or ""]
        if isinstance(value, list):
            labels = tuple(self._label(part) for part in value)
            return Example(query, join_labels(labels), labels=labels, source=source)
        return Example(query, self._label(value), source=source)

    def _label(self, value: object) -> str:
        if value == -1:  # marks hidden test labels
            value = None
        if not self.classes or not isinstance(value, int):
            return label_text(_text(value, "label"))
        if not 0 <= value < len(self.classes):
            raise LoadError(
                f"label must be below {len(self.classes)}, got {value}",
                hint="check the file and its class names",
            )
        return label_text(self.classes[value])


def _named(features: Features, usual: Sequence[str]) -> str | None:
    return next((name for name in usual if name in features), None)


def _classes(feature: object) -> tuple[str, ...]:
    """Return the class names of a ClassLabel, or of a list of them."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _check(names: Names, features: Features) -> None:
    columns_hint = f"its columns are {', '.join(features)}"
    for name in (names.image, names.label, names.question, names.answer):
        if name is not None and name not in features:
            raise LoadError(f"column {name!r} does not exist", hint=columns_hint)
    if names.label is None and names.answer is None:
        raise LoadError(
            "label and answer columns are missing",
            hint=f"name one with label_column or answer_column; {columns_hint}",
        )
    if names.image is None and names.question is None:
        raise LoadError(
            "image and question columns are missing",
            hint=f"name one with image_column or question_column; {columns_hint}",
        )


def _answer(value: object) -> str:
    match value:
        case {"text": [first, *_]}:  # SQuAD: variants of one answer
            return _text(first, "answer")
        case {"text": one} | {"answer": one}:
            return _text(one, "answer")
        case [_, *_]:
            answers = [_answer(part) for part in value]
            return Counter(answers).most_common(1)[0][0]
    return _text(value, "answer")


def _text(value: object, what: str) -> str:
    is_nan = value != value
    if value is None or is_nan or value == [] or not str(value).strip():
        raise LoadError(f"{what} is missing", hint=f"choose a split with {what}s")
    if not isinstance(value, str | int | float):
        raise LoadError(
            f"{what} must be a text or a number, got {type(value).__name__}",
            hint=f"name another column for the {what}",
        )
    return str(value)


PARQUET = ".parquet"


def load_hugging_face(
    id_or_path: str | Path,
    split: str = "train",
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    question: str = IMAGE_QUESTION,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield the rows of a hub id, a folder with parquet files, or one parquet file; rows are
    streamed.

    Columns that are not named are inferred from their types and usual names. An answer column takes
    precedence over a label column. Of several answers the most frequent counts (the first of a
    tie), of SQuAD's variants the first; a list of labels is multi-label. Image paths must be inside
    the folder, or the folder of the parquet file. Unreadable rows go to `on_error`, which raises by
    default.
    """
    report = error_handler(on_error)
    name = str(id_or_path)
    given = Names(image_column, label_column, question_column, answer_column)
    with library_errors(name):
        stream = _stream(name, split)
        path = Path(name)
        # Images given as paths are read only from here; a data set on the hub has no folder.
        folder = path if path.is_dir() else path.parent if path.is_file() else None
        columns = Columns.infer(stream.features or {}, given, question, folder)
        rows = _rows(stream, columns)
    number = 0
    while True:
        with library_errors(name):
            row = next(rows, None)
        if row is None:
            return
        source = f"{path_text(name)}, {split}, row {number}"
        number += 1
        try:
            example = columns.example(row, source)
        except (LoadError, ImageError) as error:
            report(LoadError(f"{source}: {error}", hint=error.hint))
        else:
            yield example


def count_rows(id_or_path: str | Path, split: str = "train") -> int | None:
    """Return the number of rows that `load_hugging_face` reads, None if the count requires
    reading them."""
    name, path = str(id_or_path), Path(id_or_path)
    try:
        with library_errors(name):
            import datasets
            from pyarrow import parquet

            files: Sequence[str] = [name]
            if not path.is_file():
                builder = datasets.load_dataset_builder(name)
                known = (builder.info.splits or {}).get(split)
                if known is not None and known.num_examples:
                    return int(known.num_examples)
                files = (builder.config.data_files or {}).get(split, ())
            paths = [Path(file) for file in files]
            if not all(path.suffix == PARQUET and path.is_file() for path in paths):
                return None
            return sum(parquet.read_metadata(path).num_rows for path in paths) or None
    except LoadError:  # the loader reports it
        return None


def _stream(name: str, split: str) -> datasets.IterableDataset:
    import datasets

    path = Path(name)
    if path.suffix == PARQUET and path.is_file():
        files = {split: name}
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=True)
    if path.is_absolute() and not path.exists():
        raise LoadError(f"{path_text(name)} does not exist", hint="check the path")
    return datasets.load_dataset(name, split=split, streaming=True)


def _rows(stream: datasets.IterableDataset, columns: Columns) -> Iterator[Row]:
    import datasets

    image = columns.names.image
    if image is not None and isinstance(stream.features[image], datasets.Image):
        # Keep the original bytes: re-encoding would change the image's hash.
        stream = stream.cast_column(image, datasets.Image(decode=False))
    return iter(stream)
