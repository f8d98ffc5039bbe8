"""Questions that several people answered."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from bottega.errors import ImageError, LoadError
from bottega.evaluation.benchmarks.fields import UNUSABLE, Row, image, needed, texts
from bottega.evaluation.benchmarks.source import OnBad
from bottega.evaluation.benchmarks.tables import read_rows
from bottega.image import Image
from bottega.knowledge.bad import or_raise
from bottega.types import Example, Query

# What a row is called, the row.
Named = tuple[str, Row]


@dataclass(frozen=True)
class Asked:
    """A question; the example's answer is the most frequent of its `answers`."""

    example: Example
    answers: tuple[str, ...]


Make = Callable[[Row, str], Asked]


def asked(
    row: Row, source: str, *, id: str, answers: Sequence[str], images: tuple[Image, ...]
) -> Asked:
    ranked = Counter(answer for answer in answers if answer).most_common(1)
    if not ranked:
        raise LoadError("nobody has answered", hint="choose a split with answers")
    query = Query(needed(row, "question"), images, id=id)
    return Asked(Example(query, ranked[0][0], source=source), tuple(answers))


def read_asked(rows: Iterable[Named], make: Make, on_bad: OnBad | None) -> list[Asked]:
    """Rows of which `make` raises `LoadError` or `ImageError` go to `on_bad`, as do those whose
    id has been seen: whose annotators would be asked?"""
    report = or_raise(on_bad)
    made: dict[str, Asked] = {}
    for source, row in rows:
        try:
            one = make(row, source)
            if one.example.query.id in made:
                raise LoadError(f"the id {one.example.query.id} stands twice", hint=UNUSABLE)
        except (LoadError, ImageError) as error:
            report(LoadError(f"{source}: {error}", hint=error.hint))
        else:
            made[str(one.example.query.id)] = one
    return list(made.values())


def examples(part: Sequence[Asked]) -> tuple[Example, ...]:
    return tuple(one.example for one in part)


def references(part: Sequence[Asked]) -> dict[str, tuple[str, ...]]:
    return {str(one.example.query.id): one.answers for one in part}


def said(row: Row, name: str) -> tuple[str, ...]:
    """What the annotators said: texts, objects with an `answer`, or a list written as text."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise LoadError(f"{name} is no list", hint=UNUSABLE) from error
    if isinstance(value, list):
        value = [part.get("answer") if isinstance(part, dict) else part for part in value]
    return texts({name: value}, name)


def from_table(place: str) -> Make:
    """For rows with question_id, question, answers and image (or none, which is text alone)."""

    def make(row: Row, source: str) -> Asked:
        id, images = needed(row, "question_id"), pictures(row, place, source)
        return asked(row, source, id=id, answers=said(row, "answers"), images=images)

    return make


def pictures(row: Row, place: str, source: str) -> tuple[Image, ...]:
    value = row.get("image")
    return () if value is None else (image(value, place, source),)


def first_split(place: str, *splits: str) -> Iterator[Named]:
    """The rows of the first split that is there: mirrors of a data set name them differently."""
    for split in splits[:-1]:
        rows = read_rows(place, split)
        try:
            return chain([next(rows)], rows)
        except (LoadError, StopIteration):
            continue
    return read_rows(place, splits[-1])


def shown_split(place: str, *splits: str, layout: str) -> Iterator[Named]:
    """The same for what is shown, which some mirrors lack and the published `layout` has."""
    rows = first_split(place, *splits)
    try:
        return chain([next(rows)], rows)
    except (LoadError, StopIteration) as error:
        reason = str(error) or "the table is empty"
        raise LoadError(f"{place} has nothing to show: {reason}", hint=layout) from error
