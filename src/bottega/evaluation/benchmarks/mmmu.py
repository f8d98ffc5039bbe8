"""MMMU and MathVision."""

from __future__ import annotations

import ast
import re
import warnings
from functools import partial

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import (
    UNUSABLE,
    by_letter,
    image,
    read_examples,
    required,
    text,
    texts,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.mathvision import (
    MathVisionAccuracy,
    OfficialMathVisionAccuracy,
    OfficialMathVisionParser,
)
from bottega.evaluation.metrics.official_choices import SUBJECT, MMMUAccuracy, OfficialMMMUParser
from bottega.knowledge.loaders.jsonl import Row
from bottega.parsing import ChoiceParser, FinalAnswerParser, RationaleParser
from bottega.prompting import MATH_V, MATH_V_REASONED, MMMU, MMMU_REASONED
from bottega.types import Example, Query

IMAGES = [f"image_{number}" for number in range(1, 8)]
ID = re.compile(r"(?:dev|validation|test)_(.+)_\d+")
UNPUBLISHED = "?"  # the answer of every question of test
OPTIONS = {
    "split": ("dev", "validation"),
    "knowledge": ("", "test"),
    "images": ("any", "one"),
    "unparsable": ("none", "random"),
    "scoring": ("official", "lenient"),
}
SCORING = {"scoring": ("lenient", "official")}


def mmmu(source: Source) -> Benchmark:
    """Load MMMU, with open and multiple-choice questions.

    `split=dev` evaluates dev (150 items) with validation (900) as the knowledge base, as in RCTS
    and Cache-of-Thought; `split=validation` swaps the two. `knowledge=test` replaces the examples
    by the questions of test, whose answers are not published: a master must answer them
    (Cache-of-Thought's WarmStart). `scoring=lenient` reads choices with `ChoiceParser` instead of
    MMMU's official rules. `images=one` keeps items and examples with one image, as in
    Cache-of-Thought.
    """
    location, options = read_location(source, OPTIONS)
    golds: dict[str, tuple[str, ...]] = {}

    def make(row: Row, name: str, *, unpublished: bool = False) -> Example | None:
        example = _example(row, location, name, golds, unpublished=unpublished)
        wanted = options["images"] == "any" or len(example.query.images) == 1
        return example if wanted else None

    def read(split: str) -> tuple[Example, ...]:
        read_row = partial(make, unpublished=split == "test")
        return tuple(
            read_examples(location, split, read_row, on_error=source.on_error, allow_multiple=True)
        )

    query_split = options["split"]
    from_test = options["knowledge"] == "test"
    example_split = "validation" if query_split == "dev" else "dev"
    example_split = "test" if from_test else example_split
    is_random = options["unparsable"] == "random"
    parser = OfficialMMMUParser if options["scoring"] == "official" else ChoiceParser
    return Benchmark(
        source.spec,
        read(example_split),
        read(query_split),
        metrics=(MMMUAccuracy(golds, random_fallback=is_random),),
        parse=RationaleParser(
            parser(unparsable="random" if is_random else "none", seed=source.seed)
        ),
        prompt=MMMU,
        rationale_prompt=MMMU_REASONED,
        order="nearest-first",
        needs_answers=from_test,
    )


def _example(
    row: Row,
    location: str,
    name: str,
    golds: dict[str, tuple[str, ...]],
    *,
    unpublished: bool = False,
) -> Example:
    """Parse a row, whose answer may be `unpublished`; add several gold answers to `golds`.

    The markers <image 1> remain in the texts; images follow their order.
    """
    number, choices, answer = (
        required(row, "id"),
        _listed(required(row, "options")),
        required(row, "answer"),
    )
    if unpublished and answer == UNPUBLISHED:
        answers: tuple[str, ...] = (UNPUBLISHED,)
    else:
        answers = (by_letter(choices, answer),) if choices else _golds(answer)
    if len(answers) > 1:
        golds[number] = answers
    images = tuple(image(row[part], location, name) for part in IMAGES if row.get(part) is not None)
    subject = ID.fullmatch(number)
    tags = {SUBJECT: subject[1] if subject else "", "difficulty": text(row, "topic_difficulty")}
    return Example(
        Query(required(row, "question"), images, choices, number),
        answers[0],
        rationale=text(row, "explanation") or None,
        tags={tag: value for tag, value in tags.items() if value},
        source=name,
    )


def _golds(answer: str) -> tuple[str, ...]:
    """Return the open answers: three items of validation have a list."""
    try:
        return _listed(answer) or (answer,)
    except LoadError:
        return (answer,)


def _listed(written: str) -> tuple[str, ...]:
    """Parse a Python list of texts, the published form of the options."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # LaTeX: "\\c" is no escape
            found = ast.literal_eval(written)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise LoadError(f"{written[:80]!r} is not a list", hint=UNUSABLE) from error
    if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
        raise LoadError(f"{written[:80]!r} is not a list of texts", hint=UNUSABLE)
    return tuple(found)


def mathvision(source: Source) -> Benchmark:
    """Load MathVision: testmini (304 items), with the rest of test (2,736) as the knowledge
    base. `scoring=official` scores like its published code."""
    location, options = read_location(source, SCORING)

    def make(row: Row, name: str) -> Example:
        return _mathvision_example(row, location, name)

    items = read_examples(location, "testmini", make, on_error=source.on_error)
    query_ids = {item.query.id for item in items}
    everything = read_examples(location, "test", make, on_error=source.on_error)
    is_official = options["scoring"] == "official"
    parse = RationaleParser(FinalAnswerParser())
    return Benchmark(
        source.spec,
        tuple(example for example in everything if example.query.id not in query_ids),
        tuple(items),
        metrics=(OfficialMathVisionAccuracy() if is_official else MathVisionAccuracy(),),
        parse=OfficialMathVisionParser(parse) if is_official else parse,
        prompt=MATH_V,
        rationale_prompt=MATH_V_REASONED,
        order="nearest-first",
    )


def _mathvision_example(row: Row, location: str, name: str) -> Example:
    """Parse a row; one image covers all <image1>, <image2> markers of the question."""
    choices, answer = texts(row, "options"), required(row, "answer")
    pixels = row.get("decoded_image") or row.get("image")
    tags = {tag: text(row, tag) for tag in ("subject", "level")}
    return Example(
        Query(
            required(row, "question"),
            (image(pixels, location, name),),
            choices,
            required(row, "id"),
        ),
        by_letter(choices, answer) if choices else answer,
        rationale=text(row, "solution") or None,
        tags={tag: value for tag, value in tags.items() if value},
        source=name,
    )
