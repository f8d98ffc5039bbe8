"""Benchmarks by name: loaded, limited, with label noise, checked for overlap."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from bottega._util.progress import plural
from bottega.errors import ImageError, LoadError, NoticeError, OnError, SettingError
from bottega.evaluation.benchmark import Benchmark, is_passage
from bottega.evaluation.benchmarks.built_in import SYNTHETIC, synthetic, task_corruption, tiles
from bottega.evaluation.benchmarks.files import (
    digits,
    image_folder,
    jsonl,
    knowledge_base,
    manyicl,
    table,
)
from bottega.evaluation.benchmarks.mmmu import mathvision, mmmu
from bottega.evaluation.benchmarks.okvqa import aokvqa, okvqa
from bottega.evaluation.benchmarks.scienceqa import scienceqa
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.benchmarks.vizwiz import vizwiz
from bottega.evaluation.benchmarks.vl_icl import vl_icl
from bottega.evaluation.benchmarks.vsr import vsr, vsr_mc
from bottega.evaluation.image_copies import CopySearch, Signatures, signature_of
from bottega.evaluation.methods.controls import corrupt, label_confusion
from bottega.evaluation.metrics.metric import labels_of
from bottega.knowledge.loaders.archives import is_archive
from bottega.knowledge.loaders.delimited import is_delimited
from bottega.knowledge.loaders.folders import faint_images, similar_labels
from bottega.knowledge.loaders.tables import PARQUET
from bottega.naming import SAMPLED
from bottega.types import Example

KNOWLEDGE_BASE = "knowledge-base"
SOURCES: dict[str, Callable[[Source], Benchmark]] = {
    "digits": digits,
    "tiles": tiles,
    **dict.fromkeys(SYNTHETIC, synthetic),
    "image-folder": image_folder,
    "manyicl": manyicl,
    "jsonl": jsonl,
    "table": table,
    KNOWLEDGE_BASE: knowledge_base,
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
WITHOUT_LOCATION = {"digits", "tiles", *SYNTHETIC}
LABELLED_IMAGES = ("image-folder", "manyicl")
OWN_DATA = {*LABELLED_IMAGES, "jsonl", "table", KNOWLEDGE_BASE}
PUBLISHED = tuple(name for name in SOURCES if name not in WITHOUT_LOCATION | OWN_DATA)


def load_benchmark(
    spec: str,
    *,
    seed: int,
    limit: int | None = None,
    per_class: int | None = None,
    kb_share: float = 1.0,
    label_noise: float = 0.0,
    allow_overlap: bool = False,
    on_error: OnError | None = None,
) -> Benchmark:
    """Load a benchmark: `digits`, `tiles` or a synthetic task with options, such as
    `digits:half=second` or `glyphs:ways=5,shots=5`, or another of `SOURCES` with a location, such
    as `image-folder:DIR`.

    `limit` is the maximum number of items, `per_class` that of examples per label in the knowledge
    base (of each episode), `kb_share` the share of its examples (of each episode) that remain;
    `seed` samples all of them, and splits a folder without split folders.
    `label_noise` is the share of corrupted answers in the knowledge base. Raises `LoadError` for
    items in both parts, unless `allow_overlap` is set or the source is a knowledge base, whose
    items are evaluated by leave-one-out. `on_error` also receives a `NoticeError` of items that
    look like copies of examples, of similar labels, and of images that use almost none of their
    16 bits."""
    loaded = _load_source(spec, seed, on_error)
    signatures: Signatures = {}
    examples = [e for e in loaded.knowledge if _is_readable(e, signatures, on_error)]
    items = [e for e in _with_ids(loaded.items) if _is_readable(e, signatures, on_error)]
    rng = random.Random(seed)
    rng.shuffle(items)
    if per_class is not None:
        examples = _limit_per_class(examples, per_class, rng)
    if kb_share < 1:
        examples = _sample_share(examples, kb_share, seed)
    benchmark = replace(loaded, knowledge=tuple(examples), items=tuple(items[:limit]))
    if label_noise:
        benchmark = with_label_noise(benchmark, spec, label_noise, seed)
    _check_size(benchmark)
    kind = spec.partition(":")[0]
    if len(benchmark.labels) == 1 and kind in OWN_DATA - {"jsonl"}:
        raise LoadError(
            f"{benchmark.name} has the label {benchmark.labels[0]!r} only: every answer is right",
            hint="add a folder of images of another class",
        )
    if not (allow_overlap or kind == KNOWLEDGE_BASE):  # leave-one-out
        _check_overlap(benchmark)
    if on_error is not None and kind not in WITHOUT_LOCATION:
        _report_copies(benchmark, signatures, on_error)
    if on_error is not None:
        images = (image for example in benchmark.knowledge for image in example.query.images)
        notices = similar_labels(benchmark.labels), faint_images(islice(images, SAMPLED))
        for notice in filter(None, notices):
            on_error(notice)
    return benchmark


def with_label_noise(data: Benchmark, spec: str, share: float, seed: int) -> Benchmark:
    """Return the benchmark with a share of the answers in its knowledge base corrupted."""
    corruption = task_corruption(spec) or label_confusion(data.knowledge)
    knowledge = tuple(corrupt(data.knowledge, share, corruption, seed=seed))
    replaced = _count_replaced(data.knowledge, knowledge)
    return replace(data, knowledge=knowledge, corrupted_count=replaced)


def _load_source(spec: str, seed: int, on_error: OnError | None) -> Benchmark:
    """Load all items and examples."""
    source = Source(spec, seed, on_error)
    if source.kind in SOURCES and not (source.location or source.kind in WITHOUT_LOCATION):
        raise SettingError(
            f"benchmark {source.kind} needs a folder or a Hugging Face id",
            hint=f"write {source.kind}:DIR",
        )
    if source.kind not in SOURCES:
        path = Path(spec)
        is_table = is_delimited(path) or path.suffix == PARQUET
        if spec and (is_table or path.is_dir() or is_archive(path)):
            kind = "table" if is_table else "image-folder"
            raise SettingError(f"{spec} is a path, not a benchmark", hint=f"use {kind}:{spec}")
        specs = ", ".join(name if name in WITHOUT_LOCATION else f"{name}:DIR" for name in SOURCES)
        close = get_close_matches(source.kind, SOURCES, n=1)
        similar = f"did you mean {spec.replace(source.kind, close[0], 1)}? " if close else ""
        raise SettingError(f"unknown benchmark {spec!r}", hint=f"{similar}use {specs}")
    return SOURCES[source.kind](source)


def _with_ids(items: Sequence[Example]) -> list[Example]:
    """Give items without an id their position as id: methods look up an item's data by id."""
    return [
        item if item.query.id else replace(item, query=replace(item.query, id=f"item {index}"))
        for index, item in enumerate(items, 1)
    ]


def _is_readable(item: Example, signatures: Signatures, on_error: OnError | None) -> bool:
    """Report and exclude a damaged image before anything is counted or run."""
    try:
        for image in item.query.images:
            signatures[image.sha256] = signature_of(image)
    except ImageError as error:
        if on_error is None:
            raise
        on_error(error)
        return False
    return True


def _count_replaced(before: Sequence[Example], after: Sequence[Example]) -> int:
    """Count the objects of `after` that are not in `before`."""
    kept = {id(example) for example in before}
    return sum(id(example) not in kept for example in after)


def _limit_per_class(
    knowledge: Sequence[Example], per_class: int, rng: random.Random
) -> list[Example]:
    """Limit the examples of each label; passages have none, so all remain."""
    kept: dict[tuple[str | None, str], int] = defaultdict(int)
    chosen: list[Example] = []
    for example in rng.sample(knowledge, len(knowledge)):
        classes = [(example.tags.get("episode"), label) for label in labels_of(example)]
        if is_passage(example) or any(kept[one] < per_class for one in classes):
            chosen.append(example)
            for one in classes:
                kept[one] += 1
    return chosen


def _sample_share(examples: Sequence[Example], share: float, seed: int) -> list[Example]:
    """Return a random share of the examples of each episode, at least one, in their order."""
    episodes: defaultdict[str | None, list[Example]] = defaultdict(list)
    for example in examples:
        episodes[example.tags.get("episode")].append(example)
    rng = random.Random(f"{seed}:share")
    kept: set[int] = set()
    for some in episodes.values():
        kept.update(map(id, rng.sample(some, max(1, round(share * len(some))))))
    return [example for example in examples if id(example) in kept]


def _check_size(benchmark: Benchmark) -> None:
    if not benchmark.items or not benchmark.knowledge:
        raise LoadError(
            f"{benchmark.name} needs items and examples, got"
            f" {plural(len(benchmark.items), 'item')} and"
            f" {plural(len(benchmark.knowledge), 'example')}",
            hint="check the folder; each class folder needs two images",
        )


def _check_overlap(benchmark: Benchmark) -> None:
    examples = {part for example in benchmark.knowledge for part in _identities(example)}
    shared = sum(not examples.isdisjoint(_identities(item)) for item in benchmark.items)
    if shared:
        raise LoadError(
            f"{shared} of {len(benchmark.items)} test items are also in the knowledge base (same"
            " question and image)",
            hint="remove them from one part; bottega eval accepts them with --allow-overlap",
        )


def _report_copies(data: Benchmark, signatures: Signatures, on_error: OnError) -> None:
    """Report items that look like an example with the same question, in other bytes."""
    known: defaultdict[str, dict[str, Example]] = defaultdict(dict)
    for example in data.knowledge:
        known[_folded_text(example)].update((i.sha256, example) for i in example.query.images)
    searches = {
        text: CopySearch({sha256: signatures[sha256] for sha256 in found})
        for text, found in known.items()
        if found
    }
    copies: list[tuple[Example, Example]] = []
    for item in data.items:
        text, images = _folded_text(item), (image.sha256 for image in item.query.images)
        if (search := searches.get(text)) is not None:
            found = chain.from_iterable(search.copies(one, signatures[one]) for one in images)
            copies += [(item, known[text][one]) for one in islice(found, 1)]
    if copies:
        pair = " and ".join(str(example.source) for example in copies[0])
        on_error(
            NoticeError(
                f"{len(copies)} of {len(data.items)} evaluated items look like labelled examples in"
                f" another size or encoding, for example {pair}; such copies inflate the results:"
                " keep one of each pair"
            )
        )


def _identities(example: Example) -> list[tuple[str, str]]:
    """Return the normalized question and choices with each image of the example."""
    text = _folded_text(example)
    return [(text, image.sha256) for image in example.query.images] or [(text, "")]


def _folded_text(example: Example) -> str:
    """Return the normalized question and sorted choices."""
    loaded = " ".join((example.query.text, *sorted(example.query.choices)))
    folded = unicodedata.normalize("NFKC", loaded).casefold()
    return " ".join(re.findall(r"\w+", folded))
