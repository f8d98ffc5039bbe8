"""VL-ICL's tasks with a word or a number as the answer: clevr and textocr."""

from __future__ import annotations

from pathlib import Path

from bottega.errors import LoadError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import UNUSABLE, Downloads, required, texts
from bottega.evaluation.benchmarks.okvqa import (
    AnnotatedQuestion,
    annotated_question,
    examples,
    read_questions,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.open_answers import Containment, ExactMatch
from bottega.knowledge.loaders.jsonl import Row
from bottega.parsing import plain_text
from bottega.prompting import InterleavedPrompter

OPTIONS = {"split": ("query", "support")}
LAYOUT = (
    "use a task's folder, such as VL-ICL/clevr, with query.json, support.json and the"
    " images or their zips: git clone https://huggingface.co/datasets/ys-zong/VL-ICL"
)


def vl_icl(source: Source) -> Benchmark:
    """Load DIR/clevr or DIR/textocr: the query set, with the support set as the knowledge base.

    `split=support` swaps the two, as Cache-of-Thought does. Examples alone convey the task, as in
    the published runs without a task description.
    """
    location, options = read_location(source, OPTIONS)
    task = Path(location).absolute()
    # The paths in the files begin with the task's name.
    downloads = Downloads(task.parent, LAYOUT)
    items = options["split"]
    labelled = "support" if items == "query" else "query"
    knowledge, evaluated = (
        examples(_part(downloads, task.name, part, source)) for part in (labelled, items)
    )
    return Benchmark(
        source.spec,
        knowledge,
        evaluated,
        metrics=(ExactMatch(), Containment()),
        parse=plain_text,
        prompt=InterleavedPrompter(show_choices=False),
    )


def _part(downloads: Downloads, task: str, part: str, source: Source) -> list[AnnotatedQuestion]:
    def make(row: Row, name: str) -> AnnotatedQuestion:
        image = row.get("image")
        paths = texts({"image": [image] if isinstance(image, str) else image}, "image")
        images = tuple(map(downloads.image, (_found(downloads, path, task) for path in paths)))
        if not images:
            raise LoadError("the row has no image", hint=UNUSABLE)
        answers = (required(row, "answer"),)
        return annotated_question(row, name, id=name, answers=answers, images=images)

    return read_questions(downloads.rows(f"{task}/{part}.json"), make, source.on_error)


def _found(downloads: Downloads, path: str, task: str) -> str:
    return downloads.find(path, f"{task}/{path}") or path
