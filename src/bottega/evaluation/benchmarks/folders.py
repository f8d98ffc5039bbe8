"""Labelled image sets in folders: one folder a class, and ManyICL's one-hot CSV files."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from bottega.evaluation.benchmark import Benchmark, labelled
from bottega.evaluation.benchmarks.source import Source
from bottega.knowledge import has_splits, load_image_folder, load_manyicl
from bottega.knowledge.loading.labelled import QUESTION
from bottega.types import Example

HELD_OUT_SHARE = 0.25


def image_folder(source: Source) -> Benchmark:
    """With train/ and test/, or else split by the seed."""
    folder, question = _folder_and_question(source.place)
    root = Path(folder)
    load = partial(load_image_folder, question=question, on_bad=source.on_bad)
    if has_splits(root):
        knowledge, items = (list(load(root, split=split)) for split in ("train", "test"))
    else:
        knowledge, items = _stratified(load(root), source.seed)
    return labelled(source.spec, knowledge, items)


def manyicl(source: Source) -> Benchmark:
    folder, question = _folder_and_question(source.place)
    knowledge, items = (
        list(load_manyicl(folder, split, question=question, on_bad=source.on_bad))
        for split in ("demo", "test")
    )
    return labelled(source.spec, knowledge, items)


def _folder_and_question(place: str) -> tuple[str, str]:
    """Split `DIR,question=TEXT`. The question comes last, so it may contain commas or be empty."""
    folder, given, question = place.partition(",question=")
    return folder, question if given else QUESTION


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
