"""Visual Spatial Reasoning: true or false captions; and VSR-MC of RCTS: the missing relation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.benchmarks.downloads import (
    UNUSABLE,
    Make,
    image,
    read_examples,
    read_rows,
    required,
    text,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.official_choices import OneStatementParser
from bottega.image import Image, path_text
from bottega.knowledge.loaders.jsonl import Row
from bottega.parsing import ChoiceParser, RationaleParser
from bottega.prompting import VSR_MC
from bottega.protocols import Parser
from bottega.types import Example, Query

EXAMPLE_SPLITS, ITEM_SPLIT = ("train", "dev"), "test"
IMAGES = {"images": ("all", "none")}
MC_OPTIONS = IMAGES | {"scoring": ("lenient", "official")}
DISTRACTORS = 5
LABELS = {0: "false", 1: "true"}
GAP = "(is) ___"


def vsr(source: Source) -> Benchmark:
    """Load VSR: test, with train and dev as the knowledge base.

    They have 2195 and 8777 rows in the random split, 1222 and 3829 in the zero-shot split. A
    location holds train.jsonl, dev.jsonl and test.jsonl; the images are in `images/` there or up to
    two folders above. `images=none` omits them.
    """
    location, options = read_location(source, IMAGES)
    images_of = _images_of(Path(location), options["images"])

    def make(row: Row, name: str) -> Example:
        question = f'Is this true of the image? "{required(row, "caption")}"'
        tags = {"relation": required(row, "relation")}
        return Example(
            Query(question, images_of(row), id=Path(name).name),
            _label(row),
            tags=tags,
            source=name,
        )

    knowledge, items = _parts(location, make, source)
    return labelled_benchmark(source.spec, knowledge, items)


def vsr_mc(source: Source) -> Benchmark:
    """Load VSR-MC: the true captions of the random split, 1181 of test and 4440 of train and dev.

    The choices are the relation and five of the other 65, sampled and shuffled by the seed; RCTS
    sampled them without one. It reads the same locations as `vsr`.
    `scoring=official` reads only replies with one "The answer is B" (`OneStatementParser`).
    """
    location, options = read_location(source, MC_OPTIONS)
    images_of = _images_of(Path(location), options["images"])
    relations = _relations(location)

    def make(row: Row, name: str) -> Example | None:
        relation = required(row, "relation")
        if _label(row) == "false":
            return None
        short = Path(name).name  # equal ids and choices in any folder
        rng = random.Random(f"{source.seed} {short}")
        others = rng.sample([one for one in relations if one != relation], DISTRACTORS)
        choices = tuple(rng.sample([relation, *others], DISTRACTORS + 1))
        question = f"What belongs in the gap? {masked(required(row, 'caption'), relation)}"
        return Example(Query(question, images_of(row), choices, short), relation, source=name)

    knowledge, items = _parts(location, make, source)
    parse: Parser = RationaleParser(ChoiceParser(whole_words=True))
    return Benchmark(
        source.spec,
        knowledge,
        items,
        parse=OneStatementParser(parse) if options["scoring"] == "official" else parse,
        prompt=VSR_MC,
        order="nearest-first",
    )


def masked(caption: str, relation: str) -> str:
    """Return the caption with a gap for the relation, matched as whole words: "person" contains
    "on".

    A preceding "is" is removed too, since it reveals which relations fit.
    """
    matches = list(re.finditer(rf"(?:\bis )?(?<!\w){re.escape(relation)}(?!\w)", caption, re.I))
    if len(matches) != 1:
        raise LoadError(
            f"{relation!r} must occur once in {caption!r}, got {len(matches)} times", hint=UNUSABLE
        )
    start, end = matches[0].span()
    return f"{caption[:start]}{GAP}{caption[end:]}"


def _parts(location: str, make: Make, source: Source) -> tuple[tuple[Example, ...], ...]:
    """Return the examples and the items."""
    found = {
        split: read_examples(location, split, make, on_error=source.on_error)
        for split in (*EXAMPLE_SPLITS, ITEM_SPLIT)
    }
    return tuple(e for split in EXAMPLE_SPLITS for e in found[split]), tuple(found[ITEM_SPLIT])


def _label(row: Row) -> str:
    label = row.get("label")
    if isinstance(label, int) and label in LABELS:
        return LABELS[label]
    raise LoadError(f"label must be 0 or 1, got {label!r}", hint=UNUSABLE)


def _relations(location: str) -> list[str]:
    rows = [row for split in (*EXAMPLE_SPLITS, ITEM_SPLIT) for _, row in read_rows(location, split)]
    found = sorted({text(row, "relation") for row in rows} - {""})
    if len(found) <= DISTRACTORS:
        raise LoadError(
            f"{location} needs more than {DISTRACTORS} relations, got {len(found)}",
            hint="use the whole random split, with 66 relations",
        )
    return found


def _images_of(location: Path, which: str) -> Callable[[Row], tuple[Image, ...]]:
    """Return a function that loads a row's images, from `images/` or COCO's `train2017/` below."""
    if which == "none":
        return lambda row: ()
    folders = [above / "images" for above in (location, *location.absolute().parents[:2])]
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        raise LoadError(
            f"{path_text(location)} has no folder images/ with VSR's images",
            hint="copy the files of image_link (COCO's train2017 and val2017) "
            f"to {path_text(folders[0])}, or append ,images=none to the location to omit them",
        )

    def of(row: Row) -> tuple[Image, ...]:
        name = required(row, "image")
        below = "/".join(text(row, "image_link").split("/")[-2:])
        found = below if below and (folder / below).is_file() else name
        return (image(found, str(folder), name),)

    return of
