"""Benchmarks by name: whole, thinned, made wrong in part, and never overlapping by accident."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from bottega.errors import ImageError, LoadError, OnError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.files import digits, image_folder, jsonl, manyicl
from bottega.evaluation.benchmarks.mmmu import mathvision, mmmu
from bottega.evaluation.benchmarks.okvqa import aokvqa, okvqa
from bottega.evaluation.benchmarks.scienceqa import scienceqa
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.benchmarks.synthetic import SYNTHETIC, synthetic, task_corruption
from bottega.evaluation.benchmarks.vizwiz import vizwiz
from bottega.evaluation.benchmarks.vl_icl import vl_icl
from bottega.evaluation.benchmarks.vsr import vsr, vsr_mc
from bottega.evaluation.controls import corrupt, label_confusion
from bottega.evaluation.examples import is_passage, labels_of
from bottega.types import Example

SOURCES: dict[str, Callable[[Source], Benchmark]] = {
    "digits": digits,
    **dict.fromkeys(SYNTHETIC, synthetic),
    "image-folder": image_folder,
    "manyicl": manyicl,
    "jsonl": jsonl,
    "okvqa": okvqa,
    "aokvqa": aokvqa,
    "vizwiz": vizwiz,
    "vl-icl": vl_icl,
    "mathvision": mathvision,
    "mmmu": mmmu,
    "scienceqa": scienceqa,
    "vsr": vsr,
    "vsr-mc": vsr_mc,
}
WITHOUT_PLACE = {"digits", *SYNTHETIC}
LABELLED_IMAGES = ("image-folder", "manyicl")
OWN_DATA = {*LABELLED_IMAGES, "jsonl"}
PUBLISHED = tuple(name for name in SOURCES if name not in WITHOUT_PLACE | OWN_DATA)


def load_benchmark(
    spec: str,
    *,
    seed: int,
    limit: int | None = None,
    per_class: int | None = None,
    label_noise: float = 0.0,
    allow_overlap: bool = False,
    on_error: OnError | None = None,
) -> Benchmark:
    """`digits` or a drawn task with its knobs, such as `digits:half=second` or
    `glyphs:ways=5,shots=5`, or another of `SOURCES` with its place, such as `image-folder:DIR` or
    `mmmu:DIR,asked=validation`.

    `limit` keeps that many items and `per_class` that many examples a label in the knowledge
    base (of each episode); both are drawn by `seed`, as is the split of a folder without train/ and
    test/. `label_noise` is the share of the answers in this knowledge base that are made wrong.
    Items that stand in both parts are refused unless `allow_overlap`.
    """
    whole = _whole(spec, seed, on_error)
    found = [example for example in whole.knowledge if _is_readable(example, on_error)]
    items = [item for item in _named(whole.items) if _is_readable(item, on_error)]
    rng = random.Random(seed)
    rng.shuffle(items)
    if per_class is not None:
        found = _thin(found, per_class, rng)
    knowledge = found
    if label_noise:
        corruption = task_corruption(spec) or label_confusion(found)
        knowledge = corrupt(found, label_noise, corruption, seed=seed)
    benchmark = replace(
        whole,
        knowledge=tuple(knowledge),
        items=tuple(items[:limit]),
        corrupted_count=_replaced(found, knowledge) if label_noise else None,
    )
    _check_size(benchmark)
    if not allow_overlap:
        _check_overlap(benchmark)
    return benchmark


def _whole(spec: str, seed: int, on_error: OnError | None) -> Benchmark:
    """Everything there is, as it is found."""
    source = Source(spec, seed, on_error)
    if source.kind not in SOURCES or not (source.place or source.kind in WITHOUT_PLACE):
        places = ", ".join(name if name in WITHOUT_PLACE else f"{name}:DIR" for name in SOURCES)
        raise SettingError(f"unknown benchmark {spec!r}", hint=f"use {places}")
    return SOURCES[source.kind](source)


def _named(items: Sequence[Example]) -> list[Example]:
    """By their place where they have no id: methods look up by it what belongs to an item."""
    return [
        item if item.query.id else replace(item, query=replace(item.query, id=f"item {place}"))
        for place, item in enumerate(items, 1)
    ]


def _is_readable(item: Example, on_error: OnError | None) -> bool:
    """A damaged image is named and left out before anything is counted or run."""
    try:
        for image in item.query.images:
            image.decode(at_least=1)
    except ImageError as error:
        if on_error is None:
            raise
        on_error(error)
        return False
    return True


def _replaced(before: Sequence[Example], after: Sequence[Example]) -> int:
    """How many of `after` are not the very objects of `before`, which may be more."""
    kept = {id(example) for example in before}
    return sum(id(example) not in kept for example in after)


def _thin(knowledge: Sequence[Example], per_class: int, rng: random.Random) -> list[Example]:
    """Passages have no class: all of them stay."""
    kept: dict[tuple[str | None, str], int] = defaultdict(int)
    chosen: list[Example] = []
    for example in rng.sample(knowledge, len(knowledge)):
        classes = [(example.tags.get("episode"), label) for label in labels_of(example)]
        if is_passage(example) or any(kept[one] < per_class for one in classes):
            chosen.append(example)
            for one in classes:
                kept[one] += 1
    return chosen


def _check_size(benchmark: Benchmark) -> None:
    if not benchmark.items or not benchmark.knowledge:
        raise LoadError(
            f"{benchmark.name} has {len(benchmark.items)} items to ask and "
            f"{len(benchmark.knowledge)} examples to show; both are needed",
            hint="look at what the folder holds; classes in folders need two images each",
        )


def _check_overlap(benchmark: Benchmark) -> None:
    known = {part for example in benchmark.knowledge for part in _identities(example)}
    shared = sum(not known.isdisjoint(_identities(item)) for item in benchmark.items)
    if shared:
        raise LoadError(
            f"{shared} of {len(benchmark.items)} test items also stand in the knowledge base (the"
            " same question, about the same image if it has one)",
            hint="remove them from one of the two, or pass --allow-overlap and say so",
        )


def _identities(example: Example) -> list[tuple[str, str]]:
    """The question, written in any way, with its own choices in any order and each of its images:
    "Which of these is larger?" is another question with other choices."""
    whole = " ".join((example.query.text, *sorted(example.query.choices)))
    folded = unicodedata.normalize("NFKC", whole).casefold()
    text = " ".join(re.findall(r"\w+", folded))
    return [(text, image.sha256) for image in example.query.images] or [(text, "")]
