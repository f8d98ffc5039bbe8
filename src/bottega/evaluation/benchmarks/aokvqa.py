"""A-OKVQA: questions about photographs, answered freely or by one of four choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.annotators import (
    Asked,
    Make,
    Named,
    asked,
    examples,
    first_split,
    pictures,
    read_asked,
    references,
    said,
    shown_split,
)
from bottega.evaluation.benchmarks.downloads import Downloads, coco_number
from bottega.evaluation.benchmarks.fields import Row, needed, option
from bottega.evaluation.benchmarks.knobs import read_place
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.metrics.vqa import direct_answer
from bottega.image import Image
from bottega.parsing import ChoiceParser
from bottega.prompting import Lettered

QUESTIONS = "aokvqa_v1p0_{}.json"
LAYOUT = (
    "expected are aokvqa_v1p0_train.json and aokvqa_v1p0_val.json (aokvqa_v1p0.tar.gz of"
    " allenai/aokvqa) and the folders or zips train2017 and val2017 (cocodataset.org)"
)
KNOBS = {"answers": ("direct", "choices"), "rationales": ("no", "yes")}
Pictures = Callable[[Row, str], tuple[Image, ...]]


def aokvqa(source: Source) -> Benchmark:
    """The training questions are shown, those of validation are asked. `answers=choices` asks for
    one of the four choices; direct answers leave out the questions that are marked as too hard for
    them. `rationales=yes` shows one annotator's before each answer.
    """
    place, knobs = read_place(source, KNOBS)
    by_choice = knobs["answers"] == "choices"
    shown, items = _parts(place, source, knobs)
    whole = Benchmark(source.spec, examples(shown), examples(items), prompt=Lettered())
    if by_choice:
        return replace(whole, parse=ChoiceParser(whole_words=True))
    answers = references([*shown, *items])  # what is shown may be taught
    metrics = (direct_answer(answers), direct_answer(answers, "always-normalised"))
    return replace(whole, metrics=metrics)


def _parts(place: str, source: Source, knobs: Mapping[str, str]) -> tuple[list[Asked], list[Asked]]:
    downloads = Downloads(Path(place), LAYOUT)
    rows: list[Iterable[Named]]
    if Path(place).is_dir() and downloads.find(QUESTIONS.format("val")):
        rows = [downloads.rows(QUESTIONS.format(split)) for split in ("train", "val")]
        make = [_maker(_photographs(downloads, split), knobs) for split in ("train", "val")]
    else:
        shown = shown_split(place, "train", layout=LAYOUT)
        rows = [shown, first_split(place, "validation", "val")]
        make = [_maker(lambda row, name: pictures(row, place, name), knobs)] * 2
    if knobs["answers"] == "direct":
        rows[1] = _answerable(rows[1])
    both = [read_asked(part, made, source.on_bad) for part, made in zip(rows, make, strict=True)]
    return both[0], both[1]


def _maker(images: Pictures, knobs: Mapping[str, str]) -> Make:
    def make(row: Row, source: str) -> Asked:
        id, answers = needed(row, "question_id"), said(row, "direct_answers")
        one = asked(row, source, id=id, answers=answers, images=images(row, source))
        example = one.example
        if knobs["rationales"] == "yes":
            example = replace(example, rationale=next(iter(said(row, "rationales")), None))
        if knobs["answers"] == "choices":
            choices = said(row, "choices")
            right = option(choices, row.get("correct_choice_idx"))
            query = replace(example.query, choices=choices)
            example = replace(example, query=query, answer=right)
        return replace(one, example=example)

    return make


def _photographs(downloads: Downloads, split: str) -> Pictures:
    year = f"{split}2017"
    folder = downloads.needed(year, f"images/{year}", f"coco/{year}")
    return lambda row, source: (downloads.image(f"{folder}/{coco_number(row)}.jpg"),)


def _answerable(rows: Iterable[Named]) -> Iterator[Named]:
    """A-OKVQA's direct answers are not measured on difficult questions."""
    return ((name, row) for name, row in rows if row.get("difficult_direct_answer") is not True)
