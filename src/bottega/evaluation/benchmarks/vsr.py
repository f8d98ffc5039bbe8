"""Visual Spatial Reasoning: captions that are true of a picture or not; and VSR-MC, which RCTS
made of it: which relation belongs into the gap?"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.benchmarks.tables import (
    UNUSABLE,
    Make,
    Row,
    image,
    needed,
    read_examples,
    read_rows,
    text,
)
from bottega.image import Image, path_text
from bottega.parsing import ChoiceParser, RationaleParser
from bottega.prompting import VSR_MC
from bottega.types import Example, Query

KNOWN, ASKED = ("train", "dev"), "test"
IMAGES = {"images": ("all", "none")}
DISTRACTORS = 5
SAID = {0: "false", 1: "true"}
GAP = "(is) ___"


def vsr(source: Source) -> Benchmark:
    """test is asked, train and dev are the knowledge: 2195 and 8777 of the random split, 1222 and
    3829 of the zero-shot one. A place holds train.jsonl, dev.jsonl and test.jsonl; the pictures lie
    in `images/` there or up to two folders above. `images=none` asks blindly."""
    place, knobs = read_location(source, IMAGES)
    pictures = _pictures(Path(place), knobs["images"])

    def make(row: Row, name: str) -> Example:
        question = f'Is this true of the image? "{needed(row, "caption")}"'
        tags = {"relation": needed(row, "relation")}
        return Example(
            Query(question, pictures(row), id=Path(name).name),
            _said(row),
            tags=tags,
            source=name,
        )

    knowledge, items = _parts(place, make, source)
    return labelled_benchmark(source.spec, knowledge, items)


def vsr_mc(source: Source) -> Benchmark:
    """Of the random split's true captions 1181 of test are asked, 4440 of train and dev are the
    knowledge. The choices are the relation and five of the other 65, drawn and shuffled by the
    seed; those of RCTS were drawn without one. Places are those of `vsr`."""
    place, knobs = read_location(source, IMAGES)
    pictures = _pictures(Path(place), knobs["images"])
    relations = _relations(place)

    def make(row: Row, name: str) -> Example | None:
        relation = needed(row, "relation")
        if _said(row) == "false":
            return None
        short = Path(name).name  # the same id, and so the same choices, wherever the file lies
        rng = random.Random(f"{source.seed} {short}")
        others = rng.sample([one for one in relations if one != relation], DISTRACTORS)
        choices = tuple(rng.sample([relation, *others], DISTRACTORS + 1))
        question = f"What belongs in the gap? {masked(needed(row, 'caption'), relation)}"
        return Example(Query(question, pictures(row), choices, short), relation, source=name)

    knowledge, items = _parts(place, make, source)
    return Benchmark(
        source.spec,
        knowledge,
        items,
        parse=RationaleParser(ChoiceParser(whole_words=True)),
        prompt=VSR_MC,
    )


def masked(caption: str, relation: str) -> str:
    """The caption with a gap where the relation stands as words of its own: "on" is also in
    "person". An "is" before it goes, too, since it would tell which relations fit."""
    places = list(re.finditer(rf"(?:\bis )?(?<!\w){re.escape(relation)}(?!\w)", caption, re.I))
    if len(places) != 1:
        raise LoadError(f"{relation!r} stands {len(places)} times in {caption!r}", hint=UNUSABLE)
    start, end = places[0].span()
    return f"{caption[:start]}{GAP}{caption[end:]}"


def _parts(place: str, make: Make, source: Source) -> tuple[tuple[Example, ...], ...]:
    """The knowledge and the items."""
    found = {
        split: read_examples(place, split, make, on_error=source.on_error)
        for split in (*KNOWN, ASKED)
    }
    return tuple(e for split in KNOWN for e in found[split]), tuple(found[ASKED])


def _said(row: Row) -> str:
    label = row.get("label")
    if isinstance(label, int) and label in SAID:
        return SAID[label]
    raise LoadError(f"the label is {label!r}, neither 0 nor 1", hint=UNUSABLE)


def _relations(place: str) -> list[str]:
    rows = [row for split in (*KNOWN, ASKED) for _, row in read_rows(place, split)]
    found = sorted({text(row, "relation") for row in rows} - {""})
    if len(found) <= DISTRACTORS:
        raise LoadError(
            f"{place} has {len(found)} relations, too few for {DISTRACTORS} wrong choices",
            hint="use the whole random split, which has 66",
        )
    return found


def _pictures(place: Path, which: str) -> Callable[[Row], tuple[Image, ...]]:
    """How a row's picture is found, in `images/` or below it in COCO's `train2017/`."""
    if which == "none":
        return lambda row: ()
    folders = [above / "images" for above in (place, *place.absolute().parents[:2])]
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        raise LoadError(
            f"{path_text(place)} has no folder images/ with VSR's pictures",
            hint="copy those that image_link names in each line (COCO's train2017 and val2017) "
            f"to {path_text(folders[0])}, or write ,images=none behind the place to ask blindly",
        )

    def of(row: Row) -> tuple[Image, ...]:
        name = needed(row, "image")
        below = "/".join(text(row, "image_link").split("/")[-2:])
        found = below if below and (folder / below).is_file() else name
        return (image(found, str(folder), name),)

    return of
