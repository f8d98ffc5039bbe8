"""OK-VQA: questions about photographs that need knowledge of the world."""

from __future__ import annotations

from pathlib import Path

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.annotators import (
    Asked,
    asked,
    examples,
    first_split,
    from_table,
    read_asked,
    references,
    said,
    shown_split,
)
from bottega.evaluation.benchmarks.downloads import Downloads, coco_number
from bottega.evaluation.benchmarks.fields import UNUSABLE, Row, needed
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.metrics.vqa import vqa_accuracy
from bottega.prompting import Lettered

QUESTIONS = "OpenEnded_mscoco_{}_questions.json"
ANNOTATIONS = "mscoco_{}_annotations.json"
LAYOUT = (
    "expected are OpenEnded_mscoco_train2014_questions.json and mscoco_train2014_annotations.json"
    " (okvqa.allenai.org), the folder or zip train2014 (cocodataset.org), and all three of val2014"
)


def okvqa(source: Source) -> Benchmark:
    """The training questions are shown, those of validation are asked: in the published files, or
    in a table with both splits."""
    downloads = Downloads(Path(source.place), LAYOUT)
    if Path(source.place).is_dir() and downloads.find(QUESTIONS.format("val2014")):
        parts = [_published(downloads, split, source) for split in ("train2014", "val2014")]
    else:
        rows = (
            shown_split(source.place, "train2014", "train", layout=LAYOUT),
            first_split(source.place, "val2014", "validation", "val"),
        )
        make = from_table(source.place)
        parts = [read_asked(part, make, source.on_bad) for part in rows]
    answers = references([*parts[0], *parts[1]])  # what is shown may be taught
    return Benchmark(
        source.spec,
        examples(parts[0]),
        examples(parts[1]),
        metrics=(vqa_accuracy(answers), vqa_accuracy(answers, "always-normalised")),
        prompt=Lettered(),
    )


def _published(downloads: Downloads, split: str, source: Source) -> list[Asked]:
    """The answers are the annotators' stemmed ones, against which OK-VQA is scored."""
    rows = downloads.rows(ANNOTATIONS.format(split), key="annotations")
    annotations = {str(row.get("question_id")): row for _, row in rows}
    folder = downloads.needed(split, f"images/{split}", "images")

    def make(row: Row, name: str) -> Asked:
        id = needed(row, "question_id")
        if id not in annotations:
            raise LoadError(f"nobody has answered question {id}", hint=UNUSABLE)
        picture = f"{folder}/COCO_{split}_{coco_number(row)}.jpg"
        answers = said(annotations[id], "answers")
        return asked(row, name, id=id, answers=answers, images=(downloads.image(picture),))

    questions = downloads.rows(QUESTIONS.format(split), key="questions")
    return read_asked(questions, make, source.on_bad)
