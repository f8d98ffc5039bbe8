"""Labelled image sets as benchmarks: a knowledge base, questions with known answers, labels."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import BottegaError, ImageError, LoadError, SettingError
from bottega.knowledge import has_splits, load_digits, load_image_folder, load_manyicl
from bottega.types import Example

DIGITS_HELD_OUT = 500
HELD_OUT_SHARE = 0.25

OnBad = Callable[[BottegaError], None]


@dataclass(frozen=True)
class Benchmark:
    """`items` are asked, `knowledge` is what may be shown. No image stands in both."""

    name: str
    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...]
    multi_label: bool = False


def load_benchmark(
    spec: str,
    *,
    seed: int,
    limit: int | None = None,
    per_class: int | None = None,
    allow_overlap: bool = False,
    on_bad: OnBad | None = None,
) -> Benchmark:
    """`digits`, `image-folder:DIR` or `manyicl:DIR`.

    `limit` keeps that many items and `per_class` that many examples a label in the knowledge
    base; both are drawn by `seed`, as is the split of a folder without train/ and test/.
    Images that stand in both parts are refused unless `allow_overlap`.
    """
    kind, _, place = spec.partition(":")
    if kind == "digits" and not place:
        knowledge, items = _split_digits(seed)
    elif kind == "image-folder" and place:
        knowledge, items = _folder(Path(place), seed, on_bad)
    elif kind == "manyicl" and place:
        knowledge, items = (list(load_manyicl(place, s, on_bad=on_bad)) for s in ("demo", "test"))
    else:
        raise SettingError(
            f"unknown benchmark {spec!r}", hint="use digits, image-folder:DIR or manyicl:DIR"
        )
    knowledge = [example for example in knowledge if _is_readable(example, on_bad)]
    items = [item for item in items if _is_readable(item, on_bad)]
    labels = tuple(dict.fromkeys(label for e in (*knowledge, *items) for label in labels_of(e)))
    rng = random.Random(seed)
    rng.shuffle(items)
    if per_class is not None:
        knowledge = _thin(knowledge, per_class, rng)
    benchmark = Benchmark(
        name=spec,
        knowledge=tuple(knowledge),
        items=tuple(items[:limit]),
        labels=labels,
        multi_label=any(e.labels is not None and len(e.labels) != 1 for e in (*knowledge, *items)),
    )
    _check_size(benchmark)
    if not allow_overlap:
        _check_overlap(benchmark)
    return benchmark


def labels_of(example: Example) -> tuple[str, ...]:
    return (example.answer,) if example.labels is None else example.labels


def _is_readable(item: Example, on_bad: OnBad | None) -> bool:
    """A damaged image is named and left out before anything is counted or run."""
    try:
        for image in item.query.images:
            image.decode(at_least=1)
    except ImageError as error:
        if on_bad is None:
            raise
        on_bad(error)
        return False
    return True


def _split_digits(seed: int) -> tuple[list[Example], list[Example]]:
    examples = list(load_digits())
    random.Random(seed).shuffle(examples)
    return examples[DIGITS_HELD_OUT:], examples[:DIGITS_HELD_OUT]


def _folder(root: Path, seed: int, on_bad: OnBad | None) -> tuple[list[Example], list[Example]]:
    if has_splits(root):
        train, test = (
            list(load_image_folder(root, split=split, on_bad=on_bad)) for split in ("train", "test")
        )
        return train, test
    return _stratified(load_image_folder(root, on_bad=on_bad), seed)


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


def _thin(knowledge: Sequence[Example], per_class: int, rng: random.Random) -> list[Example]:
    kept: dict[str, int] = defaultdict(int)
    chosen: list[Example] = []
    for example in rng.sample(knowledge, len(knowledge)):
        labels = labels_of(example)
        if any(kept[label] < per_class for label in labels):
            chosen.append(example)
            for label in labels:
                kept[label] += 1
    return chosen


def _check_size(benchmark: Benchmark) -> None:
    if not benchmark.items or not benchmark.knowledge:
        raise LoadError(
            f"{benchmark.name} has {len(benchmark.items)} items to ask and "
            f"{len(benchmark.knowledge)} examples to show; both are needed",
            hint="give each class a folder with at least two images",
        )


def _check_overlap(benchmark: Benchmark) -> None:
    known = {image for example in benchmark.knowledge for image in example.query.images}
    shared = sum(not known.isdisjoint(item.query.images) for item in benchmark.items)
    if shared:
        raise LoadError(
            f"{shared} of {len(benchmark.items)} test images also stand in the knowledge base",
            hint="remove them from one of the two, or pass --allow-overlap and say so",
        )
