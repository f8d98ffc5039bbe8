"""Benchmarks from the user's own files, and scikit-learn's digits."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from bottega.errors import LoadError, SettingError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.benchmarks.source import Source, read_options
from bottega.evaluation.metrics.vl_icl import Containment, WholeMatch
from bottega.image import path_text
from bottega.knowledge import has_splits, load_digits, load_image_folder, load_jsonl, load_manyicl
from bottega.parsing import ChoiceParser
from bottega.prompting import LetteredPrompter
from bottega.types import IMAGE_QUESTION, Example

ASKED = 500
# In scikit-learn's order. A model that was trained on the first half never saw the second.
HALVES = {"all": slice(None), "first": slice(898), "second": slice(898, None)}


def digits(source: Source) -> Benchmark:
    """Examples to show and `ASKED` to ask; with `half=first` or `second`, of those rows alone."""
    half = str(read_options("digits", source.knobs, {"half": "all"}).get("half", "all"))
    if half not in HALVES:
        raise SettingError(f"half is {half!r}", hint=f"half may be {' or '.join(HALVES)}")
    examples = list(load_digits())[HALVES[half]]
    random.Random(source.seed).shuffle(examples)
    return labelled_benchmark(source.spec, examples[ASKED:], examples[:ASKED])


HELD_OUT_SHARE = 0.25


def image_folder(source: Source) -> Benchmark:
    """With train/ and test/, or else split by the seed."""
    folder, question = _folder_and_question(source.place)
    root = Path(folder)
    load = partial(load_image_folder, question=question, on_error=source.on_error)
    if has_splits(root):
        knowledge, items = (list(load(root, split=split)) for split in ("train", "test"))
    else:
        knowledge, items = _stratified(load(root), source.seed)
    return labelled_benchmark(source.spec, knowledge, items)


def manyicl(source: Source) -> Benchmark:
    folder, question = _folder_and_question(source.place)
    knowledge, items = (
        list(load_manyicl(folder, split, question=question, on_error=source.on_error))
        for split in ("demo", "test")
    )
    return labelled_benchmark(source.spec, knowledge, items)


def _folder_and_question(place: str) -> tuple[str, str]:
    """Split `DIR,question=TEXT`. The question comes last, so it may contain commas or be empty."""
    folder, given, question = place.partition(",question=")
    return folder, question if given else IMAGE_QUESTION


def _stratified(examples: Iterable[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """A quarter of each label's distinct images is asked, but never a label's only image."""
    by_label: dict[str, list[Example]] = defaultdict(list)
    for example in {example.query.images: example for example in examples}.values():
        by_label[example.answer].append(example)
    rng = random.Random(seed)
    knowledge: list[Example] = []
    items: list[Example] = []
    for group in by_label.values():
        rng.shuffle(group)
        held_out = min(len(group) - 1, max(1, round(len(group) * HELD_OUT_SHARE)))
        items += group[:held_out]
        knowledge += group[held_out:]
    return knowledge, items


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
        tuple(load_jsonl(path, on_error=source.on_error)) for path in _paths(source.place)
    )
    everything = (*knowledge, *items)
    own_choices = any(example.query.choices for example in everything)
    classes = any(example.labels is not None for example in everything)
    one_question = len({example.query.text for example in everything}) == 1
    if not own_choices and (classes or one_question):
        return labelled_benchmark(source.spec, knowledge, items)
    if own_choices:
        return Benchmark(
            source.spec,
            knowledge,
            items,
            parse=ChoiceParser(whole_words=True),
            prompt=LetteredPrompter(),
        )
    free = (WholeMatch(), Containment())
    return Benchmark(source.spec, knowledge, items, metrics=free, prompt=LetteredPrompter())


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
