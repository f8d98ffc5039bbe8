"""Labelled image sets and drawn tasks as benchmarks: examples to show, items to ask, labels."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bottega.errors import BottegaError, ImageError, LoadError, SettingError
from bottega.evaluation.digits import split_digits
from bottega.evaluation.drawn import DRAWN, draw_task, wrong_answer
from bottega.evaluation.labels import is_passage, labels_of
from bottega.evaluation.noise import confused, corrupted
from bottega.knowledge import has_splits, load_image_folder, load_manyicl
from bottega.types import Example

HELD_OUT_SHARE = 0.25

OnBad = Callable[[BottegaError], None]


@dataclass(frozen=True)
class Benchmark:
    """`items` are asked, `knowledge` is what may be shown. No image stands in both.

    No `labels` means that any text may be answered. `episode_of` maps the id of every item and
    every example's query to its episode, whose examples alone may be shown; empty if all may.
    `made_wrong` examples were given a wrong answer; None where no label noise was asked for.
    """

    name: str
    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...]
    multi_label: bool = False
    episode_of: Mapping[str, str] = field(default_factory=dict)
    made_wrong: int | None = None


def load_benchmark(
    spec: str,
    *,
    seed: int,
    limit: int | None = None,
    per_class: int | None = None,
    label_noise: float = 0.0,
    allow_overlap: bool = False,
    on_bad: OnBad | None = None,
) -> Benchmark:
    """`digits` or a drawn task with its knobs, such as `digits:half=second` or
    `glyphs:ways=5,shots=5`, `image-folder:DIR` or `manyicl:DIR`.

    `limit` keeps that many items and `per_class` that many examples a label in the knowledge
    base (of each episode); both are drawn by `seed`, as is the split of a folder without train/ and
    test/. `label_noise` is the share of the knowledge base's answers that are made wrong first.
    Images that stand in both parts are refused unless `allow_overlap`.
    """
    whole = _whole(spec, seed, on_bad)
    found = [example for example in whole.knowledge if _is_readable(example, on_bad)]
    items = [item for item in whole.items if _is_readable(item, on_bad)]
    labels, knowledge = _labels(whole, found, items), found
    if label_noise:
        wrong = wrong_answer(spec) or confused(found)
        knowledge = corrupted(found, label_noise, wrong, seed=seed)
    rng = random.Random(seed)
    rng.shuffle(items)
    if per_class is not None:
        knowledge = _thin(knowledge, per_class, rng)
    several = (e.labels is not None and len(e.labels) != 1 for e in (*knowledge, *items))
    benchmark = replace(
        whole,
        knowledge=tuple(knowledge),
        items=tuple(items[:limit]),
        labels=labels,
        multi_label=any(several),
        made_wrong=_replaced(found, knowledge) if label_noise else None,
    )
    _check_size(benchmark)
    if not allow_overlap:
        _check_overlap(benchmark)
    return benchmark


def _whole(spec: str, seed: int, on_bad: OnBad | None) -> Benchmark:
    """Everything there is, as it is found; labels only where a drawn task declares them."""
    kind, colon, place = spec.partition(":")
    knobs = place if colon else None
    if kind in DRAWN:
        task = draw_task(kind, knobs, seed)
        return Benchmark(spec, task.knowledge, task.items, task.labels, episode_of=task.episode_of)
    if kind == "digits":
        knowledge, items = split_digits(knobs, seed)
    elif kind == "image-folder" and place:
        knowledge, items = _folder(Path(place), seed, on_bad)
    elif kind == "manyicl" and place:
        knowledge, items = (list(load_manyicl(place, s, on_bad=on_bad)) for s in ("demo", "test"))
    else:
        raise SettingError(
            f"unknown benchmark {spec!r}",
            hint=f"use digits, image-folder:DIR, manyicl:DIR, {', '.join(DRAWN)}",
        )
    return Benchmark(spec, tuple(knowledge), tuple(items), ())


def _labels(
    whole: Benchmark, knowledge: Sequence[Example], items: Sequence[Example]
) -> tuple[str, ...]:
    if whole.name.partition(":")[0] in DRAWN:
        return whole.labels
    return tuple(dict.fromkeys(label for e in (*knowledge, *items) for label in labels_of(e)))


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


def _folder(root: Path, seed: int, on_bad: OnBad | None) -> tuple[list[Example], list[Example]]:
    if has_splits(root):
        train, test = (
            list(load_image_folder(root, split=split, on_bad=on_bad)) for split in ("train", "test")
        )
        return train, test
    return _stratified(load_image_folder(root, on_bad=on_bad), seed)


def _replaced(before: Sequence[Example], after: Sequence[Example]) -> int:
    """How many of `after` are not the very objects of `before`, which may be more."""
    kept = {id(example) for example in before}
    return sum(id(example) not in kept for example in after)


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
