"""Benchmarks from user files, and scikit-learn's digits."""

from __future__ import annotations

import random
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bottega._util.progress import plural
from bottega.errors import LoadError, OnError, SettingError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.metric import Metric
from bottega.evaluation.metrics.open_answers import (
    Containment,
    SameAnswer,
    UndecidedShare,
    WholeMatch,
)
from bottega.image import path_text
from bottega.knowledge import (
    KnowledgeBase,
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
    load_table,
)
from bottega.knowledge.loaders.archives import UNPACK, is_archive
from bottega.knowledge.loaders.delimited import METADATA, is_delimited, manyicl_classes
from bottega.knowledge.loaders.folders import find_splits, hub_snapshot
from bottega.knowledge.loaders.tables import PARQUET
from bottega.naming import read_options
from bottega.parsing import ChoiceParser
from bottega.prompting import LetteredPrompter
from bottega.types import IMAGE_QUESTION, Example

ITEMS = 500
# In scikit-learn's order: a model may train on the first half and be evaluated on the second.
HALVES = {"all": slice(None), "first": slice(898), "second": slice(898, None)}


def digits(source: Source) -> Benchmark:
    """Return `ITEMS` items and the remaining examples; `half=first` or `second` limits the rows."""
    half = str(read_options("digits", source.options, {"half": "all"}).get("half", "all"))
    if half not in HALVES:
        raise SettingError(f"half is unknown, got {half!r}", hint=f"use {' or '.join(HALVES)}")
    examples = list(load_digits())[HALVES[half]]
    random.Random(source.seed).shuffle(examples)
    return labelled_benchmark(source.spec, examples[ITEMS:], examples[:ITEMS])


HELD_OUT_SHARE = 0.25


def image_folder(source: Source) -> Benchmark:
    """Load a folder or zip archive with train/ and test/ (or val/), or split it by the seed."""
    folder, question = _folder_and_question(source.location)
    root = hub_snapshot(Path(folder))
    load = partial(load_image_folder, root, question=question, on_error=source.on_error)
    if splits := find_splits(root):
        knowledge, items = (list(load(split=one)) for one in _train_and_test(root, splits))
    else:
        knowledge, items = _stratified(load(), source.seed)
    return labelled_benchmark(source.spec, knowledge, items)


def _train_and_test(root: Path, splits: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the subfolders of examples and items. Raises `LoadError` without one of them."""
    train, test = splits.get("train", []), splits.get("test") or splits.get("val", [])
    if len(train) == len(test) == 1:
        return train[0], test[0]
    names = [name for names in splits.values() for name in names]
    spec = f"image-folder:{path_text(root / names[0])}"
    raise LoadError(
        f"{path_text(root)} has {', '.join(f'{name}/' for name in names)}, but not one train/ and"
        " one test/",
        hint=UNPACK
        if is_archive(root)
        else f"to split {names[0]}/ by the seed, run bottega eval {shlex.quote(spec)}",
    )


def manyicl(source: Source) -> Benchmark:
    """Load FOLDER/demo.csv and FOLDER/test.csv; the labels have the order of the columns."""
    folder, question = _folder_and_question(source.location)
    knowledge, items = (
        list(load_manyicl(folder, split, question=question, on_error=source.on_error))
        for split in ("demo", "test")
    )
    found = labelled_benchmark(source.spec, knowledge, items)
    columns = [name for name in manyicl_classes(folder) if name in found.labels]
    labels = dict.fromkeys((*columns, *found.labels))  # "none" has no column
    return replace(found, labels=tuple(labels))


def _folder_and_question(location: str) -> tuple[str, str]:
    """Split `DIR,question=TEXT`. The question comes last, so it may contain commas or be empty."""
    folder, given, question = location.partition(",question=")
    return folder, question if given else IMAGE_QUESTION


def _stratified(
    examples: Iterable[Example], seed: int, *, classes: bool = True
) -> tuple[list[Example], list[Example]]:
    """Hold out a quarter of each label's distinct images, but never its only image; without
    `classes`, a quarter of all distinct questions."""
    by_label: dict[str, list[Example]] = defaultdict(list)
    keyed = {one.query.images if classes else one.query: one for one in examples}
    for example in keyed.values():
        by_label[example.answer if classes else ""].append(example)
    rng = random.Random(seed)
    knowledge: list[Example] = []
    items: list[Example] = []
    for group in by_label.values():
        rng.shuffle(group)
        held_out = min(len(group) - 1, max(1, round(len(group) * HELD_OUT_SHARE)))
        items += group[:held_out]
        knowledge += group[held_out:]
    return knowledge, items


def knowledge_base(source: Source) -> Benchmark:
    """Return at most `ITEMS` labelled images of a knowledge base and all of its examples: each item
    is answered by the other examples, because a search excludes the item's own image."""
    with KnowledgeBase.open(source.location, embed=None, create=False) as knowledge:
        examples = knowledge.get_many(knowledge.ids())
    unsupported = sum(not (example.query.images and example.answer) for example in examples)
    if unsupported:
        raise LoadError(
            f"{source.location} has {plural(unsupported, 'example')} without an image or an answer",
            hint="use a knowledge base of labelled images",
        )
    items = random.Random(source.seed).sample(examples, min(ITEMS, len(examples)))
    return labelled_benchmark(source.spec, examples, items)


FILES = ("train.jsonl", "test.jsonl")
SCORING = ("same", "exact")  # of free text, the default first
TABLES = "a .csv, .tsv, .csv.gz, .tsv.gz or .parquet file, or metadata.jsonl"
LAYOUT = "use DIR with train.jsonl and test.jsonl, or jsonl:TRAIN.jsonl,TEST.jsonl"


def jsonl(source: Source) -> Benchmark:
    """Load DIR with train.jsonl (examples) and test.jsonl (items), or TRAIN,TEST.

    Rows with labels, or with one common question, are a classification with all answers as labels.
    Rows with choices are multiple choice by letter. Other answers are free text, compared with the
    row's answer by `same_answer`; with `scoring=exact` the reply, its first line or its first
    sentence must equal it up to case and punctuation.
    """
    location, options = read_location(source, {"scoring": SCORING})
    paths = _paths(location)
    if len(paths) == 1:
        paths = tuple(paths[0] / name for name in FILES)
    for path in paths:
        if not path.is_file():
            raise LoadError(f"{path_text(path)} does not exist", hint=LAYOUT)
    knowledge, items = (tuple(load_jsonl(path, on_error=source.on_error)) for path in paths)
    return _own_benchmark(source.spec, knowledge, items, options["scoring"])


def table(source: Source) -> Benchmark:
    """Load TRAIN,TEST, or one table, which the seed splits: CSV, TSV, parquet or metadata files.

    Rows are scored as those of `jsonl`. Options name the columns that are not found by usual names.
    """
    columns: dict[str, Sequence[str]] = {"image_column": (), "label_column": ()}
    location, options = read_location(source, columns | {"scoring": SCORING})
    scoring = options.pop("scoring")
    knowledge, *others = [_rows(path, options, source.on_error) for path in _paths(location)]
    items = others[0] if others else []
    if not others:
        classes = _is_classification(knowledge)
        knowledge, items = _stratified(knowledge, source.seed, classes=classes)
    return _own_benchmark(source.spec, knowledge, items, scoring)


def _rows(path: Path, columns: Mapping[str, str], on_error: OnError | None) -> list[Example]:
    if not path.is_file():
        raise LoadError(f"{path_text(path)} does not exist", hint="check the path")
    if is_delimited(path) or path.name in METADATA:
        return list(load_table(path, **columns, on_error=on_error))
    if path.suffix.lower() != PARQUET:
        raise LoadError(f"{path_text(path)} is not a table", hint=f"use {TABLES}")
    return list(load_hugging_face(path, **columns, on_error=on_error))


def _is_classification(examples: Sequence[Example]) -> bool:
    """Return whether all answers are classes: there are lists of labels, or one question."""
    classes = any(example.labels is not None for example in examples)
    one_question = len({example.query.text for example in examples}) == 1
    return not any(example.query.choices for example in examples) and (classes or one_question)


def _own_benchmark(
    spec: str, knowledge: Sequence[Example], items: Sequence[Example], scoring: str
) -> Benchmark:
    everything = (*knowledge, *items)
    if _is_classification(everything):
        return labelled_benchmark(spec, knowledge, items)
    found = Benchmark(spec, tuple(knowledge), tuple(items), prompt=LetteredPrompter())
    if any(example.query.choices for example in everything):
        return replace(found, parse=ChoiceParser(whole_words=True))
    same: tuple[Metric, ...] = (SameAnswer(), UndecidedShare(), Containment())
    exact = (WholeMatch(), Containment())
    return replace(found, metrics=exact if scoring == "exact" else same)


def _paths(location: str) -> tuple[Path, ...]:
    """Return the paths of TRAIN,TEST, or the only one."""
    train, comma, test = location.rpartition(",")
    if comma and not Path(location).exists():
        return Path(train), Path(test)
    return (Path(location),)
