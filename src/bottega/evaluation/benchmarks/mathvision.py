"""MathVision: problems of mathematics competitions, in the layout of `MathLLMs/MathVision`."""

from __future__ import annotations

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.fields import Row, by_letter, image, needed, text, texts
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.benchmarks.tables import read_examples
from bottega.evaluation.metrics.mathvision import MathVisionAccuracy
from bottega.parsing import BecauseParser, FinalAnswerParser
from bottega.prompting import MATH_V, MATH_V_REASONED
from bottega.types import Example, Query


def mathvision(source: Source) -> Benchmark:
    """testmini (304) is asked. It is a part of test: the knowledge is the rest (2,736)."""

    def make(row: Row, name: str) -> Example:
        return _example(row, source.place, name)

    items = read_examples(source.place, "testmini", make, on_bad=source.on_bad)
    asked = {item.query.id for item in items}
    everything = read_examples(source.place, "test", make, on_bad=source.on_bad)
    return Benchmark(
        source.spec,
        tuple(example for example in everything if example.query.id not in asked),
        tuple(items),
        metrics=(MathVisionAccuracy(),),
        parse=BecauseParser(FinalAnswerParser()),
        prompt=MATH_V,
        reasoned=MATH_V_REASONED,
    )


def _example(row: Row, place: str, name: str) -> Example:
    """One picture shows everything, however many <image1>, <image2> the question names."""
    choices, answer = texts(row, "options"), needed(row, "answer")
    picture = row.get("decoded_image") or row.get("image")
    tags = {tag: text(row, tag) for tag in ("subject", "level")}
    return Example(
        Query(needed(row, "question"), (image(picture, place, name),), choices, needed(row, "id")),
        by_letter(choices, answer) if choices else answer,
        rationale=text(row, "solution") or None,
        tags={tag: value for tag, value in tags.items() if value},
        source=name,
    )
