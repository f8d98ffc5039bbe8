"""Loader of tables: Hugging Face data sets and parquet files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Self

import orjson

from bottega.errors import (
    BottegaError,
    ImageError,
    LoadError,
    OnRowError,
    needs_extra,
)
from bottega.image import Image, path_text
from bottega.knowledge.loaders.folders import (
    find_image,
    join_labels,
    label_text,
    open_within,
    value_text,
)
from bottega.knowledge.loaders.jsonl import Row, parse_rows
from bottega.knowledge.loaders.scan import subfolders
from bottega.types import IMAGE_QUESTION, Example, Query

if TYPE_CHECKING:
    import datasets

# Usual names, compared without case and separators: "Image Path" is image_path.
IMAGE_NAMES = (
    *("image", "img", "picture", "decoded_image", "images", "image_path", "file_name", "filename"),
    *("file", "image_file", "image_name", "img_path", "filepath", "path"),
)
LABEL_NAMES = (
    *("label", "labels", "class", "category", "fine_label", "class_name", "label_name", "target"),
    "species",
)
QUESTION_NAMES = ("question", "query", "prompt")
ANSWER_NAMES = (
    *("answer", "answers", "multiple_choice_answer", "answer_index", "answer_idx"),
    *("correct_answer", "correct_index"),
)
CHOICES_NAMES = ("choices", "options")
COLUMN_HINT = (
    "name the column of images or their paths with image_column=NAME (bottega add: --image-column)"
)
LABEL_HINT = (
    "name one with label_column=NAME (bottega add: --label-column), or add --passages for texts"
    " alone"
)
REWRITE = "check the split, or download or write the files again"
LONGEST_LITERAL = 100_000  # base64 images in a printed list are found by a pattern
SHORTEST_BASE64 = 100  # a shorter text is the path of a missing file
# Column names -> feature types of `datasets`.
Features = Mapping[str, object]
PARQUET = ".parquet"


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Convert every error while reading `name` to one of Bottega."""
    try:
        with needs_extra("eval"):
            yield
    except BottegaError:
        raise
    except Exception as error:  # datasets, pyarrow and the hub's client have separate error trees
        for file in (Path(name), *sorted(Path(name).rglob(f"*{PARQUET}"))):
            if file.suffix.lower() == PARQUET and file.is_file():
                _check_parquet(file)
        hint = "check the name, the split and the network, or give a folder of parquet files"
        raise _unreadable(name, error, REWRITE if Path(name).exists() else hint) from error


def _check_parquet(path: Path) -> None:
    """Raise `LoadError` for a file without rows or an end, or with a column of another type."""
    import datasets
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            count, columns = file.metadata.num_rows, file.schema_arrow
    except (OSError, ValueError) as error:  # errors of pyarrow are of these classes
        raise _unreadable(str(path), error, REWRITE) from error
    if not count:
        raise LoadError(f"{path_text(path)} has no rows", hint="write rows to it, or delete it")
    for column in columns:
        try:
            datasets.Features.from_arrow_schema(arrow.schema([column]))
        except ValueError as error:
            raise LoadError(
                f"{path_text(path)}: the column {column.name!r} has the type {column.type}, which"
                " cannot be read",
                hint="write the file again without this column, or with texts",
            ) from error


def _unreadable(name: str, error: Exception, hint: str) -> LoadError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LoadError(f"{path_text(name)} cannot be loaded: {reason}", hint=hint)


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


@dataclass(frozen=True)
class Names:
    """Names of the columns; None for a column that is absent or to be inferred."""

    image: str | None = None
    label: str | None = None
    question: str | None = None
    answer: str | None = None
    choices: str | None = None
    options: tuple[str, ...] = ()  # columns A, B, C, ... with one choice each
    hint: str | None = None  # of a question, in VLMEvalKit's tables


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
        spelled = (given.image, given.label, given.question, given.answer)
        image, label, question_name, answer = (_spelled(features, name) for name in spelled)
        given = Names(image, label, question_name, answer)
        typed = (name for name, kind in features.items() if type(kind).__name__ == "Image")
        with_classes = (name for name, kind in features.items() if _classes(kind))
        letters = takewhile(features.__contains__, ascii_uppercase)
        names = Names(
            given.image or next(typed, None) or _named(features, IMAGE_NAMES),
            given.label or _named(features, LABEL_NAMES) or next(with_classes, None),
            given.question or _named(features, QUESTION_NAMES),
            given.answer or (None if given.label else _named(features, ANSWER_NAMES)),
            _named(features, CHOICES_NAMES),
            tuple(letters) if "B" in features else (),
            "hint" if "hint" in features else None,
        )
        _check(names, features)
        return cls(names, _classes(features.get(names.label or "")), question, folder)

    def example(self, row: Row, source: str) -> Example:
        names = self.names
        images = () if names.image is None else self._images(row.get(names.image), source)
        text = None if names.question is None else row.get(names.question)
        if not images and text is None:
            raise LoadError("image is missing", hint="remove the row, or add its image")
        hint = None if text is None or names.hint is None else row.get(names.hint)
        has_hint = hint == hint and str(hint or "").strip()  # NaN differs from itself
        text = f"Hint: {hint}\n{text}" if has_hint else text
        options = self._options(row)
        choices = tuple(one for one in options if one)
        query = Query(self.question if text is None else str(text), images, choices)
        column = names.answer or names.label or ""
        try:
            answer, labels = self._answer(row.get(column), options)
        except LoadError as error:
            raise LoadError(f"{error}, in the column {column!r}", hint=error.hint) from error
        return Example(query, answer, labels=labels, source=source)

    def _answer(
        self, value: object, options: tuple[str, ...]
    ) -> tuple[str, tuple[str, ...] | None]:
        """Return the answer, and the labels of a list of them. A printed list of numbers is a list
        as a label, but may be an interval as an answer."""
        names = self.names
        parts = _printed_list(value) if isinstance(value, str) else None
        if parts is not None and not (names.answer and any(type(one) is not str for one in parts)):
            value = parts
        if names.answer is None and isinstance(value, list):
            labels = tuple(self._label(part) for part in value)
            return join_labels(labels), labels
        is_answer = names.answer is not None or (any(options) and not self.classes)
        by_letter = bool(names.options) and names.choices is None
        return _answer(value, options, by_letter) if is_answer else self._label(value), None

    def _images(self, value: object, source: str) -> tuple[Image, ...]:
        if isinstance(value, str):
            if value.startswith("["):
                return tuple(self._image(part, source) for part in _list_of_texts(value))
            return (self._image(value, source),) if value.strip() else ()
        if isinstance(value, list):
            return tuple(image for part in value for image in self._images(part, source))
        is_missing = value is None or value != value  # NaN
        if is_missing:
            return ()
        cell = f"{source}, column {self.names.image!r}"
        return (image_of_cell(value, self.folder, cell, hint=COLUMN_HINT),)

    def _image(self, text: str, source: str) -> Image:
        """Return the image of a path inside the folder, a name or id in a subfolder, a
        data URL or base64."""
        folder = self.folder
        if folder and (image := find_image(folder, text, self._prefixes)) is not None:
            return image
        if len(text) >= SHORTEST_BASE64 or text.startswith("data:"):
            return Image.from_data_url(text, source=source)
        problem = "is not base64" if folder is None else f"does not exist in {path_text(folder)}"
        raise ImageError(
            f"image {text!r} {problem}",
            hint="give paths relative to the folder of the table, or base64",
        )

    @cached_property
    def _prefixes(self) -> list[str]:
        """Folders of images, relative to that of the table."""
        return ["", *(f"{name}/" for name in subfolders(self.folder or Path()))]

    def _options(self, row: Row) -> tuple[str, ...]:
        """Return the choices; an empty one keeps its place, which a letter or index may name."""
        names = self.names
        value: object = [row.get(name) for name in names.options]
        if names.choices is not None:
            cell = row.get(names.choices)
            value = _list_of_texts(cell) if isinstance(cell, str) else cell
        if not isinstance(value, list):
            return ()
        return tuple("" if one is None or one != one else value_text(one) for one in value)

    def _label(self, value: object) -> str:
        if self.classes and value == -1:  # marks hidden test labels
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
    folded: dict[str, str] = {
        re.sub(r"[\W_]", "", name.casefold()): name for name in reversed([*features])
    }
    keys = (name.replace("_", "") for name in usual)
    return next((folded[key] for key in keys if key in folded), None)


def _spelled(features: Features, name: str | None) -> str | None:
    """Return the only column of this name in any case, or else the name as given."""
    same = [one for one in features if name and one.casefold() == name.casefold()]
    return same[0] if len(same) == 1 else name


def _list_of_texts(text: str) -> list[str]:
    if not text.startswith("["):
        return []
    found = _printed_list(text)
    return [*map(str, re.findall(r"['\"]([\w+/=:;,.-]+)['\"]", text) if found is None else found)]


def _printed_list(text: str) -> list[object] | None:
    """Return the list of a cell in JSON, or as Python or NumPy prints it, None for other texts."""
    if not text.startswith("["):
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        if len(text) >= LONGEST_LITERAL:
            return None
        try:  # Python would join the texts of ['a' 'b']
            found = ast.literal_eval(re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, list) else None


def _classes(feature: object) -> tuple[str, ...]:
    """Return the class names of a ClassLabel, or of a list of them."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _check(names: Names, features: Features) -> None:
    problems, hints = list[str](), list[str]()
    for name in (names.image, names.label, names.question, names.answer):
        if name is not None and name not in features:
            problems.append(f"column {name!r} does not exist")
    if names.label is None and names.answer is None:
        problems.append("label and answer columns are missing")
        hints.append(LABEL_HINT)
    if names.image is None and names.question is None:
        problems.append("image and question columns are missing")
        hints.append(COLUMN_HINT)
    if problems:
        hints.append(f"its columns are {', '.join(features)}")
        raise LoadError("; ".join(problems), hint="; ".join(hints))


def _answer(value: object, options: Sequence[str] = (), by_letter: bool = False) -> str:
    if any(options):
        return _chosen(value, options, by_letter)
    match value:
        case {"text": [first, *_]}:  # SQuAD: variants of one answer
            return _text(first, "answer")
        case {"text": one} | {"answer": one}:
            return _text(one, "answer")
        case [_, *_]:
            answers = [_answer(part) for part in value]
            return Counter(answers).most_common(1)[0][0]
    return _text(value, "answer").strip()


def _chosen(value: object, options: Sequence[str], by_letter: bool) -> str:
    """Return the option that a text, a letter or an index (from 0) means. The letter of a column
    comes before a text that equals it."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = _text(value, "answer").strip()
    number = int(text) if text.isdecimal() else ascii_lowercase.find(text.lower())
    is_named = (text.isdecimal() or len(text) == 1) and 0 <= number < len(options)
    is_first = isinstance(value, int) or (by_letter and not text.isdecimal())
    if text in options and not (is_named and is_first):
        return text
    if is_named and options[number]:
        return options[number]
    raise LoadError(
        f"answer must be a choice, its letter or its index below {len(options)}, got {text[:80]!r}",
        hint="check the columns of the choices and the answer",
    )


def _text(value: object, what: str) -> str:
    is_nan = value != value
    if value is None or is_nan or value == [] or not str(value).strip():
        raise LoadError(f"{what} is missing", hint=f"choose a split with {what}s")
    if not isinstance(value, str | int | float):
        raise LoadError(
            f"{what} must be a text or a number, got {type(value).__name__}",
            hint="name another column with label_column=NAME (bottega add: --label-column)",
        )
    return value_text(value)


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
    name = str(id_or_path)
    given = Names(image_column, label_column, question_column, answer_column)
    with library_errors(name):
        stream = _stream(name, split)
        path = Path(name)
        # Images given as paths are read only from here; a data set on the hub has no folder.
        folder = path if path.is_dir() else path.parent if path.is_file() else None
        columns = Columns.infer(stream.features or {}, given, question, folder)
    yield from parse_rows(_rows(stream, name, split), columns.example, on_error)


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
            if not all(path.suffix.lower() == PARQUET and path.is_file() for path in paths):
                return None
            return sum(parquet.read_metadata(path).num_rows for path in paths) or None
    except LoadError:  # the loader reports it
        return None


def _stream(name: str, split: str) -> datasets.IterableDataset:
    import datasets

    path = Path(name)
    if path.suffix.lower() == PARQUET and path.is_file():
        files = {split: name}
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=True)
    if path.is_absolute() and not path.exists():
        raise LoadError(f"{path_text(name)} does not exist", hint="check the path")
    return datasets.load_dataset(name, split=split, streaming=True)


def _rows(stream: datasets.IterableDataset, name: str, split: str) -> Iterator[tuple[str, Row]]:
    with library_errors(name):
        for number, row in enumerate(undecoded(stream)):
            yield f"{path_text(name)}, {split}, row {number}", row


def undecoded(stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """Keep encoded images: decoding and re-encoding would change their hashes."""
    import datasets

    for column, feature in (stream.features or {}).items():
        if isinstance(feature, datasets.Image):
            stream = stream.cast_column(column, datasets.Image(decode=False))
    return stream
