"""OK-VQA and A-OKVQA: knowledge questions with several annotators."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from bottega.errors import LoadError, OnError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import (
    UNUSABLE,
    Downloads,
    coco_number,
    image,
    option,
    read_rows,
    required,
    texts,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.metric import NotScored
from bottega.evaluation.metrics.open_answers import direct_answer, vqa_accuracy
from bottega.image import Image
from bottega.knowledge.loaders.jsonl import Row, parse_rows
from bottega.parsing import ChoiceParser
from bottega.prompting import LetteredPrompter
from bottega.types import Example, Query

# The name of a row, and the row.
NamedRow = tuple[str, Row]
QUESTIONS = "OpenEnded_mscoco_{}_questions.json"
ANNOTATIONS = "mscoco_{}_annotations.json"
LAYOUT = (
    "use OpenEnded_mscoco_train2014_questions.json and mscoco_train2014_annotations.json"
    " (okvqa.allenai.org), the folder or zip train2014 (cocodataset.org), and all three of val2014"
)
AOKVQA_QUESTIONS = "aokvqa_v1p0_{}.json"
AOKVQA_LAYOUT = (
    "use aokvqa_v1p0_train.json and aokvqa_v1p0_val.json (aokvqa_v1p0.tar.gz of"
    " allenai/aokvqa) and the folders or zips train2017 and val2017 (cocodataset.org); for"
    " split=test also those of test"
)
OPTIONS = {"split": ("val", "test"), "answers": ("direct", "choices"), "rationales": ("no", "yes")}
UNPUBLISHED = "?"  # the answer of every question of test
SPLITS = {"val": ("validation", "val"), "test": ("test",)}  # in tables
ImagesOf = Callable[[Row, str], tuple[Image, ...]]


@dataclass(frozen=True)
class AnnotatedQuestion:
    """Question with all annotator answers; the example's answer is the most frequent one."""

    example: Example
    answers: tuple[str, ...]


MakeQuestion = Callable[[Row, str], AnnotatedQuestion]


def annotated_question(
    row: Row, source: str, *, id: str, answers: Sequence[str], images: tuple[Image, ...]
) -> AnnotatedQuestion:
    ranked = Counter(answer for answer in answers if answer).most_common(1)
    if not ranked:
        raise LoadError("the question has no answers", hint="choose a split with answers")
    query = Query(required(row, "question"), images, id=id)
    return AnnotatedQuestion(Example(query, ranked[0][0], source=source), tuple(answers))


def read_questions(
    rows: Iterable[NamedRow], make: MakeQuestion, on_error: OnError | None
) -> list[AnnotatedQuestion]:
    """Parse rows; failing rows and repeated ids go to `on_error`.

    Repeated ids are ambiguous: their annotators could belong to either row.
    """
    ids: set[str] = set()

    def make_unique(row: Row, source: str) -> AnnotatedQuestion:
        one = make(row, source)
        if (id := str(one.example.query.id)) in ids:
            raise LoadError(f"the id {id} is not unique", hint=UNUSABLE)
        ids.add(id)
        return one

    return list(parse_rows(rows, make_unique, on_error))


def examples(part: Sequence[AnnotatedQuestion]) -> tuple[Example, ...]:
    return tuple(one.example for one in part)


def references(part: Sequence[AnnotatedQuestion]) -> dict[str, tuple[str, ...]]:
    return {str(one.example.query.id): one.answers for one in part}


def annotator_answers(row: Row, name: str) -> tuple[str, ...]:
    """Parse annotator answers: texts, objects with an `answer`, or a list written as text."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise LoadError(f"{name} is not a list", hint=UNUSABLE) from error
    if isinstance(value, list):
        value = [part.get("answer") if isinstance(part, dict) else part for part in value]
    return texts({name: value}, name)


def from_table(location: str) -> MakeQuestion:
    """Return a parser of rows with question_id, question, answers and an optional image."""

    def make(row: Row, source: str) -> AnnotatedQuestion:
        id, images = required(row, "question_id"), row_images(row, location, source)
        return annotated_question(
            row, source, id=id, answers=annotator_answers(row, "answers"), images=images
        )

    return make


def row_images(row: Row, location: str, source: str) -> tuple[Image, ...]:
    value = row.get("image")
    return () if value is None else (image(value, location, source),)


def first_split(location: str, *splits: str) -> Iterator[NamedRow]:
    """Return the rows of the first existing split: mirrors name splits differently."""
    for split in splits[:-1]:
        rows = read_rows(location, split)
        try:
            return chain([next(rows)], rows)
        except (LoadError, StopIteration):
            continue
    return read_rows(location, splits[-1])


def example_split(location: str, *splits: str, layout: str) -> Iterator[NamedRow]:
    """Return the rows of the first existing example split; some mirrors lack it.

    Raises `LoadError` with the published `layout` as the hint.
    """
    rows = first_split(location, *splits)
    try:
        return chain([next(rows)], rows)
    except (LoadError, StopIteration) as error:
        reason = str(error) or "the table is empty"
        raise LoadError(f"{location} has no example split: {reason}", hint=layout) from error


def okvqa(source: Source) -> Benchmark:
    """Load OK-VQA: validation items, with the training questions as the knowledge base.

    The source has the published files, or a table with both splits.
    """
    downloads = Downloads(Path(source.location), LAYOUT)
    if Path(source.location).is_dir() and downloads.find(QUESTIONS.format("val2014")):
        parts = [_published(downloads, split, source) for split in ("train2014", "val2014")]
    else:
        rows = (
            example_split(source.location, "train2014", "train", layout=LAYOUT),
            first_split(source.location, "val2014", "validation", "val"),
        )
        make = from_table(source.location)
        parts = [read_questions(part, make, source.on_error) for part in rows]
    answers = references([*parts[0], *parts[1]])  # examples may be training items
    return Benchmark(
        source.spec,
        examples(parts[0]),
        examples(parts[1]),
        metrics=(vqa_accuracy(answers), vqa_accuracy(answers, "always-normalised")),
        prompt=LetteredPrompter(),
        relevance="stems",
    )


def _published(downloads: Downloads, split: str, source: Source) -> list[AnnotatedQuestion]:
    """Read the published files, with the stemmed answers that OK-VQA scores against."""
    rows = downloads.rows(ANNOTATIONS.format(split), key="annotations")
    annotations = {str(row.get("question_id")): row for _, row in rows}
    folder = downloads.required(split, f"images/{split}", "images")

    def make(row: Row, name: str) -> AnnotatedQuestion:
        id = required(row, "question_id")
        if id not in annotations:
            raise LoadError(f"question {id} has no answers", hint=UNUSABLE)
        path = f"{folder}/COCO_{split}_{coco_number(row)}.jpg"
        answers = annotator_answers(annotations[id], "answers")
        return annotated_question(
            row, name, id=id, answers=answers, images=(downloads.image(path),)
        )

    questions = downloads.rows(QUESTIONS.format(split), key="questions")
    return read_questions(questions, make, source.on_error)


def aokvqa(source: Source) -> Benchmark:
    """Load A-OKVQA: validation items, with the training questions as the knowledge base.

    `split=test` replaces the items by the questions of test, whose answers are not published: they
    are not scored (`evaluation.predictions` exports the replies). `answers=choices` requests one
    of the four choices; direct answers exclude the questions marked as too difficult.
    `rationales=yes` adds one annotator's rationale to each example.
    """
    location, options = read_location(source, OPTIONS)
    by_choice = options["answers"] == "choices"
    shown, items = _parts(location, source, options)
    whole = Benchmark(source.spec, examples(shown), examples(items), prompt=LetteredPrompter())
    if by_choice:
        whole = replace(whole, parse=ChoiceParser(whole_words=True))
    if options["split"] == "test":
        return replace(whole, metrics=(NotScored(),))
    if by_choice:
        return whole
    answers = references([*shown, *items])  # examples may be training items
    metrics = (direct_answer(answers), direct_answer(answers, "always-normalised"))
    return replace(whole, metrics=metrics)


def _parts(
    location: str, source: Source, options: Mapping[str, str]
) -> tuple[list[AnnotatedQuestion], list[AnnotatedQuestion]]:
    downloads = Downloads(Path(location), AOKVQA_LAYOUT)
    rows: list[Iterable[NamedRow]]
    split = options["split"]
    files = (AOKVQA_QUESTIONS.format(part) for part in (split, "val"))
    if Path(location).is_dir() and downloads.find(*files):
        rows = [downloads.rows(AOKVQA_QUESTIONS.format(part)) for part in ("train", split)]
        images = [_photographs(downloads, part) for part in ("train", split)]
    else:
        shown = example_split(location, "train", layout=AOKVQA_LAYOUT)
        rows = [shown, first_split(location, *SPLITS[split])]
        images = [lambda row, name: row_images(row, location, name)] * 2
    make = [_maker(images[0], options), _maker(images[1], options, unpublished=split == "test")]
    if options["answers"] == "direct":
        rows[1] = _answerable(rows[1])
    both = [
        read_questions(part, made, source.on_error) for part, made in zip(rows, make, strict=True)
    ]
    return both[0], both[1]


def _maker(
    images: ImagesOf, options: Mapping[str, str], *, unpublished: bool = False
) -> MakeQuestion:
    def make(row: Row, source: str) -> AnnotatedQuestion:
        id = required(row, "question_id")
        answers = (UNPUBLISHED,) if unpublished else annotator_answers(row, "direct_answers")
        one = annotated_question(row, source, id=id, answers=answers, images=images(row, source))
        example = one.example
        if options["rationales"] == "yes" and not unpublished:
            example = replace(
                example, rationale=next(iter(annotator_answers(row, "rationales")), None)
            )
        if options["answers"] == "choices":
            choices = annotator_answers(row, "choices")
            gold = UNPUBLISHED if unpublished else option(choices, row.get("correct_choice_idx"))
            query = replace(example.query, choices=choices)
            example = replace(example, query=query, answer=gold)
        return replace(one, example=example)

    return make


def _photographs(downloads: Downloads, split: str) -> ImagesOf:
    year = f"{split}2017"
    folder = downloads.required(year, f"images/{year}", f"coco/{year}")
    return lambda row, source: (downloads.image(f"{folder}/{coco_number(row)}.jpg"),)


def _answerable(rows: Iterable[NamedRow]) -> Iterator[NamedRow]:
    """Exclude difficult questions, which have no direct-answer score."""
    return ((name, row) for name, row in rows if row.get("difficult_direct_answer") is not True)
