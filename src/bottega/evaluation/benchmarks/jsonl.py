"""Your own questions: two files of one JSON object a line."""

from __future__ import annotations

from pathlib import Path

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark, labelled
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.metrics.vl_icl import Containment, WholeMatch
from bottega.image import path_text
from bottega.knowledge import load_jsonl
from bottega.parsing import ChoiceParser
from bottega.prompting import Lettered

FILES = ("train.jsonl", "test.jsonl")
LAYOUT = "expected are DIR/train.jsonl and DIR/test.jsonl, or jsonl:KNOWN.jsonl,ASKED.jsonl"


def jsonl(source: Source) -> Benchmark:
    """DIR with train.jsonl (shown) and test.jsonl (asked), or the two files with a comma between.

    Rows with labels, or that all ask the same, are a classification: what answers there are, is
    the choice. Rows with choices list them by letter and are read as multiple choice. Other
    answers are free, and right if they are the row's but for case and outer punctuation, whole or
    up to a line's or a sentence's end.
    """
    knowledge, items = (
        tuple(load_jsonl(path, on_bad=source.on_bad)) for path in _paths(source.place)
    )
    everything = (*knowledge, *items)
    own_choices = any(example.query.choices for example in everything)
    classes = any(example.labels is not None for example in everything)
    one_question = len({example.query.text for example in everything}) == 1
    if not own_choices and (classes or one_question):
        return labelled(source.spec, knowledge, items)
    if own_choices:
        return Benchmark(
            source.spec, knowledge, items, parse=ChoiceParser(whole_words=True), prompt=Lettered()
        )
    free = (WholeMatch(), Containment())
    return Benchmark(source.spec, knowledge, items, metrics=free, prompt=Lettered())


def _paths(place: str) -> tuple[Path, Path]:
    train, comma, test = place.rpartition(",")
    if comma and not Path(place).is_dir():
        paths = Path(train), Path(test)
    else:
        paths = Path(place) / FILES[0], Path(place) / FILES[1]
    for path in paths:
        if not path.is_file():
            raise LoadError(f"{path_text(path)} is not there", hint=LAYOUT)
    return paths
