"""Which column of a table is what, and how its rows become examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bottega.errors import LoadError
from bottega.knowledge.loading.foreign import image_cell
from bottega.knowledge.loading.labelled import joined, label_text
from bottega.types import Example, Query

IMAGE_NAMES = ("image", "img", "picture", "decoded_image")
LABEL_NAMES = ("label", "labels", "class", "category", "fine_label")
QUESTION_NAMES = ("question", "query", "prompt")
ANSWER_NAMES = ("answer", "answers", "multiple_choice_answer")

NAME_ONE = "name the column of encoded images with image_column"

Row = Mapping[str, object]
# Column names to the feature types of `datasets`.
Features = Mapping[str, object]


@dataclass(frozen=True)
class Names:
    image: str | None = None
    label: str | None = None
    question: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Columns:
    """`classes` are the names behind the numbers of the label column, if it has any. Images that
    are paths are read only from `folder`."""

    names: Names
    classes: tuple[str, ...]
    question: str
    folder: Path | None

    @classmethod
    def guessed(cls, features: Features, given: Names, question: str, folder: Path | None) -> Self:
        names = Names(
            given.image or _of_type(features, "Image") or _named(features, IMAGE_NAMES),
            given.label or _labels(features),
            given.question or _named(features, QUESTION_NAMES),
            given.answer or _named(features, ANSWER_NAMES),
        )
        _check(names, features)
        return cls(names, _classes(features.get(names.label or "")), question, folder)

    def example(self, row: Row, source: str) -> Example:
        names = self.names
        value = None if names.image is None else row[names.image]
        images = () if value is None else (image_cell(value, self.folder, source, hint=NAME_ONE),)
        asked = None if names.question is None else row[names.question]
        query = Query(self.question if asked is None else str(asked), images)
        if names.answer is not None:
            return Example(query, _answer(row[names.answer]), source=source)
        value = row[names.label or ""]
        if isinstance(value, list):
            labels = tuple(self._label(part) for part in value)
            return Example(query, joined(labels), labels=labels, source=source)
        return Example(query, self._label(value), source=source)

    def _label(self, value: object) -> str:
        if value == -1:  # how hidden test labels are published
            value = None
        if not self.classes or not isinstance(value, int):
            return label_text(_text(value, "label"))
        if not 0 <= value < len(self.classes):
            raise LoadError(
                f"label {value} is none of the {len(self.classes)} classes",
                hint="the file is damaged, or its classes are those of another",
            )
        return label_text(self.classes[value])


def _named(features: Features, usual: Sequence[str]) -> str | None:
    return next((name for name in usual if name in features), None)


def _of_type(features: Features, type_name: str) -> str | None:
    return next((name for name in features if type(features[name]).__name__ == type_name), None)


def _labels(features: Features) -> str | None:
    with_classes = [name for name in features if _classes(features[name])]
    return _named(features, LABEL_NAMES) or next(iter(with_classes), None)


def _classes(feature: object) -> tuple[str, ...]:
    """Of a ClassLabel, or of a list of them."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _check(names: Names, features: Features) -> None:
    there = f"its columns are {', '.join(features)}"
    for name in (names.image, names.label, names.question, names.answer):
        if name is not None and name not in features:
            raise LoadError(f"there is no column {name!r}", hint=there)
    if names.label is None and names.answer is None:
        raise LoadError(
            "no column looks like labels or answers",
            hint=f"name one with label_column or answer_column; {there}",
        )
    if names.image is None and names.question is None:
        raise LoadError(
            "no column looks like images or questions",
            hint=f"name one with image_column or question_column; {there}",
        )


def _answer(value: object) -> str:
    match value:
        case {"text": [first, *_]}:  # SQuAD: the spellings of one answer
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
        raise LoadError(f"there is no {what}", hint=f"choose a split with {what}s")
    if not isinstance(value, str | int | float):
        raise LoadError(
            f"{type(value).__name__} is not a text", hint=f"name another column for the {what}"
        )
    return str(value)
