"""VizWiz: questions of blind people about their photographs, some of them unanswerable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import Downloads, required, text
from bottega.evaluation.benchmarks.okvqa import (
    AnnotatedQuestion,
    MakeQuestion,
    NamedRow,
    annotated_question,
    annotator_answers,
    example_split,
    examples,
    first_split,
    from_table,
    read_questions,
    references,
)
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.metrics.metric import Metric
from bottega.evaluation.metrics.open_answers import (
    UNANSWERABLE,
    Answerability,
    vizwiz_accuracy,
    vqa_accuracy,
)
from bottega.knowledge.loaders.jsonl import Row
from bottega.parsing import LabelParser, RationaleParser
from bottega.prompting import VIZ_WIZ

ANNOTATIONS = ("Annotations/{}.json", "annotations/{}.json", "{}.json")
LAYOUT = (
    "use Annotations/train.json and Annotations/val.json and the folders or zips train and"
    " val (vizwiz.org)"
)


def vizwiz(source: Source) -> Benchmark:
    """Load VizWiz: validation items, with the training questions as the knowledge base.

    The test split has no answers. The tag `answerable` is 0 or 1.
    """
    downloads = Downloads(Path(source.location), LAYOUT)
    rows: list[Iterable[NamedRow]]
    if Path(source.location).is_dir() and downloads.find(*_files("val")):
        rows = [downloads.rows(*_files(split)) for split in ("train", "val")]
        make = [_photographed(downloads, split) for split in ("train", "val")]
    else:
        shown_rows = example_split(source.location, "train", layout=LAYOUT)
        rows = [shown_rows, first_split(source.location, "val", "validation")]
        make = [from_table(source.location)] * 2
    shown, items = (
        read_questions(part, _tagged(made), source.on_error)
        for part, made in zip(rows, make, strict=True)
    )
    return Benchmark(
        source.spec,
        examples(shown),
        examples(items),
        metrics=_metrics(items),
        parse=RationaleParser(LabelParser()),
        prompt=VIZ_WIZ,
        order="nearest-first",
        reward_metric=vqa_accuracy(references(shown), "always-normalised"),
    )


def _metrics(items: Sequence[AnnotatedQuestion]) -> tuple[Metric, ...]:
    answers = references(items)
    accuracy = (vizwiz_accuracy(answers), vqa_accuracy(answers, "always-normalised"))
    tagged = (one.example for one in items if one.example.tags["answerable"] == "0")
    unanswerable = {str(example.query.id) for example in tagged}
    if not unanswerable:
        return accuracy
    return (*accuracy, Answerability(unanswerable, "ap"), Answerability(unanswerable, "f1"))


def _tagged(make: MakeQuestion) -> MakeQuestion:
    def tagged(row: Row, source: str) -> AnnotatedQuestion:
        one = make(row, source)
        return replace(one, example=replace(one.example, tags={"answerable": _answerable(row)}))

    return tagged


def _answerable(row: Row) -> str:
    """Return the annotation, or derive it from the answer type, as the hub's table requires."""
    kind = text(row, "category") or text(row, "answer_type")
    return text(row, "answerable") or str(int(kind != UNANSWERABLE))


def _photographed(downloads: Downloads, split: str) -> MakeQuestion:
    folder = downloads.required(split, f"images/{split}", f"Images/{split}")

    def make(row: Row, source: str) -> AnnotatedQuestion:
        id = required(row, "image")
        images = (downloads.image(f"{folder}/{id}"),)
        return annotated_question(
            row, source, id=id, answers=annotator_answers(row, "answers"), images=images
        )

    return make


def _files(split: str) -> tuple[str, ...]:
    return tuple(name.format(split) for name in ANNOTATIONS)
