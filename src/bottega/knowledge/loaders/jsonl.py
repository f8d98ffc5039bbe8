"""Loaders of JSON Lines: one object per line."""

from __future__ import annotations

import gzip
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import orjson

from bottega.errors import ImageError, LoadError, OnRowError, error_handler
from bottega.image import Image, path_text
from bottega.knowledge.loaders.folders import (
    existing_name,
    join_labels,
    label_text,
    one_line,
    open_within,
    value_text,
)
from bottega.types import IMAGE_QUESTION, Example, Query

FIELDS = (
    'write {"image": "cat.jpg", "question": "...", "answer": "..."}; optional: images, label,'
    " labels, choices, rationale, tags"
)

PASSAGE = 'write {"text": "..."}; optional: id, image, images, tags'
# Read where there is neither `image` nor `images`.
IMAGE_FIELD = re.compile(r"(image|img)_?(\d+|path|file|name)|file_?name", re.IGNORECASE)
ANSWERS = ("answer", "label", "labels")
ONE_LINE = "write each object on one line"
# A packed file of a few MB can hold a line that does not fit into memory.
MAX_LINE = 512 << 20

Row = Mapping[str, object]
RowT = TypeVar("RowT")
Made = TypeVar("Made")


def load_jsonl(
    path: str | Path, *, question: str = IMAGE_QUESTION, on_error: OnRowError | None = None
) -> Iterator[Example]:
    """Yield the examples of a file whose lines have `answer`, `label` or `labels`, and optionally
    `image` (or a list `images`, or fields such as `file_name` or `image_1`), `question`, `choices`,
    `rationale` and `tags` (an object). Other fields are ignored.

    An image is a data URL, base64 or a path. A relative path must stay inside the file's folder. An
    absolute path may lead anywhere, so load only files whose absolute paths you trust: images are
    sent to the model. A line that cannot be read goes to `on_error` with its number, as does an
    answer that contradicts its label or is not among its choices; `on_error` raises by default.
    Blank lines are skipped.
    """
    path = Path(path)
    with open_lines(path) as lines:
        yield from read_jsonl(
            lines, path_text(path), folder=path.parent, question=question, on_error=on_error
        )


def count_lines(path: str | Path) -> int:
    """Return the number of lines that are not blank. Raises `LoadError`."""
    with open_lines(Path(path)) as lines:
        return sum(1 for line in lines if line.strip())


def load_passage_lines(
    path: str | Path, *, on_error: OnRowError | None = None
) -> Iterator[Example]:
    """Yield passages, which are examples without an answer, from lines with `text`, and optionally
    `id`, `image` (or a list `images`) and `tags`. Images and errors are handled as in
    `load_jsonl`."""
    path = Path(path)
    shown = path_text(path)

    def passage(row: Row, source: str) -> Example:
        if answered := [name for name in ANSWERS if row.get(name) is not None]:
            raise LoadError(
                f"a passage cannot have the field {answered[0]}",
                hint="add examples without --passages",
            )
        text = (field_text(row, "text") or "").strip()
        if not text:
            raise LoadError("text is missing", hint=PASSAGE)
        query = Query(text, _images(row, path.parent, source), id=field_text(row, "id"))
        # One shared source: a text per passage could need more memory than the passage.
        return Example(query, "", tags=_tags(row), source=shown)

    with open_lines(path) as lines:
        yield from parse_rows(json_rows(lines, shown), passage, on_error)


def read_jsonl(
    lines: Iterable[bytes],
    name: str,
    *,
    folder: Path | None = None,
    question: str = IMAGE_QUESTION,
    whole_replies: bool = False,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield examples from lines of another source, called `name` in errors. See `load_jsonl`.

    Without a folder, images are never paths, so lines from a client open no file. `whole_replies`
    accepts answers that contain more than one of the choices.
    """

    def example(row: Row, source: str) -> Example:
        labels, answer = _labels(row)
        choices = field_texts(row, "choices") or ()
        if not whole_replies:
            answer = answer.strip()  # else " cat" and "cat" would be two classes
            _check_choices(choices, (answer,) if labels is None else labels)
        return Example(
            Query(field_text(row, "question") or question, _images(row, folder, source), choices),
            answer,
            labels=labels,
            rationale=field_text(row, "rationale"),
            tags=_tags(row),
            source=source,
        )

    return parse_rows(json_rows(lines, name), example, on_error)


@contextmanager
def open_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """Open a file, unpacked if it ends in .gz, as an iterator of lines. Raises `LoadError`."""
    shown = path_text(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield _bounded_lines(cast(IO[bytes], file), shown)
    except OSError as error:  # including `gzip.BadGzipFile`
        raise LoadError(
            f"{shown} cannot be read: {error.strerror or error}", hint="check the path"
        ) from error
    except (EOFError, zlib.error) as error:
        raise LoadError(f"{shown} is damaged: {error}", hint="copy the file again") from error


def _bounded_lines(file: IO[bytes], shown: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise LoadError(
                f"{shown}, line {number} is longer than {MAX_LINE >> 20} MB",
                hint="give images as paths",
            )
        yield line


def json_rows(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, Row | LoadError]]:
    """Yield the object of each line that is not blank, or its error, with its name."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError as error:
            row = LoadError(f"not valid JSON: {error.msg}", hint=ONE_LINE)
        if not isinstance(row, dict | LoadError):
            row = LoadError(f"the line must be an object, got {type(row).__name__}", hint=ONE_LINE)
        yield f"{name}, line {number}", row


def parse_rows(
    rows: Iterable[tuple[str, RowT | LoadError]],
    make: Callable[[RowT, str], Made | None],
    on_error: OnRowError | None,
) -> Iterator[Made]:
    """Yield what `make` returns for each named row, unless it is None. Its `LoadError` and
    `ImageError`, and those among the rows, go to `on_error` with the name."""
    report = error_handler(on_error)
    for source, row in rows:
        try:
            if isinstance(row, LoadError):
                raise row
            made = make(row, source)
        except (LoadError, ImageError) as error:
            named = str(error) if str(error).startswith(source) else f"{source}: {error}"
            report(LoadError(named, hint=error.hint))
        else:
            if made is not None:
                yield made


def _labels(row: Row) -> tuple[tuple[str, ...] | None, str]:
    given = field_texts(row, "labels")
    labels = None if given is None else tuple(dict.fromkeys(map(label_text, given)))
    answer, label = field_text(row, "answer"), field_text(row, "label")
    answer = None if answer is None else unicodedata.normalize("NFC", answer)
    if label is not None:
        label = label_text(label)
        if answer is None:
            answer = label
        elif answer.strip() and one_line(answer).casefold() != label.casefold():
            raise LoadError(
                f"the label {label!r} and the answer {answer!r} contradict each other",
                hint="give one of them, or the class in labels and a longer text in answer",
            )
    if answer is None and labels is not None:
        answer = join_labels(labels)
    if answer is None:
        raise LoadError("answer, label and labels are missing", hint=FIELDS)
    if not answer.strip():
        raise LoadError("the answer is empty", hint=FIELDS)
    return labels, answer


def _check_choices(choices: Sequence[str], answers: Sequence[str]) -> None:
    allowed = set(map(one_line, choices))
    for each in answers:
        if allowed and one_line(each) not in allowed:
            raise LoadError(
                f"{each!r} is not among the choices {', '.join(choices)}",
                hint="use one of the choices as the answer",
            )


def _images(row: Row, folder: Path | None, source: str) -> tuple[Image, ...]:
    images = field_texts(row, "images") or ()
    single = field_text(row, "image")
    if single is not None:
        images = (single, *images)
    elif not images:
        named = (field_text(row, name) for name in row if IMAGE_FIELD.fullmatch(name))
        images = tuple(filter(None, named))
    return tuple(_image(text, folder, source) for text in images)


def _image(text: str, folder: Path | None, source: str) -> Image:
    if text.startswith("data:"):
        return Image.from_data_url(text, source=source)
    if folder is not None and (name := existing_name(folder, text)) is not None:
        return Image.open(folder / name) if Path(name).is_absolute() else open_within(folder, name)
    try:
        return Image.from_data_url(text, source=source)
    except ImageError as error:
        shown = text if len(text) <= 80 else text[:77] + "..."
        if folder is None:
            raise ImageError(
                f"image must be base64, got {shown!r}", hint="send images as data URLs"
            ) from error
        raise ImageError(
            f"image must be a file or base64, got {shown!r}",
            hint="give paths relative to the JSONL file",
        ) from error


def field_text(row: Row, name: str, hint: str = FIELDS) -> str | None:
    """Return the text, number or boolean of a field, None if it is missing. Raises `LoadError`."""
    value = row.get(name)
    if value is None or _is_text(value):
        return None if value is None else value_text(value)
    raise _wrong(name, "a text", value, hint)


def field_texts(row: Row, name: str, hint: str = FIELDS) -> tuple[str, ...] | None:
    """Return the texts of a list by `field_text`, None if it is missing. Raises `LoadError`."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, list) and all(map(_is_text, value)):
        return tuple(map(value_text, value))
    raise _wrong(name, "a list of texts", value, hint)


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | float)


def _tags(row: Row) -> dict[str, str]:
    tags = row.get("tags") or {}
    if not isinstance(tags, dict):
        raise _wrong("tags", "an object of texts", tags, FIELDS)
    return {name: text for name in tags if (text := field_text(tags, name)) is not None}


def _wrong(name: str, wanted: str, value: object, hint: str) -> LoadError:
    return LoadError(f"{name} must be {wanted}, got {type(value).__name__}", hint=hint)
