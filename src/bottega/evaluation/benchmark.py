"""What a benchmark is: examples to show, items to ask, how replies are read and scored."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bottega.evaluation.labels import is_passage, labels_of
from bottega.evaluation.metrics.labels import Accuracy, MacroF1
from bottega.evaluation.metrics.metric import Metric
from bottega.evaluation.metrics.vqa import AnnotatorAgreement
from bottega.parsing import LabelParser
from bottega.protocols import Parser, Prompter
from bottega.types import Example


def answers_of(data: Benchmark, item: Example) -> tuple[str, ...]:
    """All that its annotators said, where the benchmark's metrics know them."""
    for metric in data.metrics:
        if isinstance(metric, AnnotatorAgreement) and (said := metric.annotators(item)):
            return tuple(dict.fromkeys(said))
    return item.labels or (item.answer,)


def gives(example: Example, answers: Sequence[str]) -> bool:
    if is_passage(example):
        return holds(example.query.text, answers)
    return _folded(example.answer) in map(_folded, answers)


def holds(passage: str, answers: Iterable[str]) -> bool:
    """Any answer stands in it as whole words, in any case. (`is_relevant` in `passages`, by which
    OK-VQA's retrievers are measured, finds "art" in "start".)"""
    folded = _folded(passage)
    return any(
        re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", folded)
        for wanted in map(_folded, answers)
        if wanted
    )


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class Benchmark:
    """`items` are asked, `knowledge` is what may be shown. Nothing stands in both.

    No `labels` means that any text may be answered. `episode_of` maps the id of every item and
    every example's query to its episode, whose examples alone may be shown; empty if all may.
    `corrupted_count` examples were given a wrong answer; None where no label noise was asked for.
    Methods are compared by the first of the `metrics`. `prompt` is what suits the questions, None
    if that is the model's affair; `reasoned` takes its place where demonstrations are to show their
    rationales, if that takes another one.
    """

    name: str
    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    episode_of: Mapping[str, str] = field(default_factory=dict)
    corrupted_count: int | None = None
    metrics: tuple[Metric, ...] = field(default=(Accuracy(),), compare=False)
    parse: Parser = field(default_factory=LabelParser, compare=False)
    prompt: Prompter | None = field(default=None, compare=False)
    reasoned: Prompter | None = field(default=None, compare=False)


def labelled(name: str, knowledge: Iterable[Example], items: Iterable[Example]) -> Benchmark:
    """A benchmark of the labels that stand in its examples."""
    knowledge, items = tuple(knowledge), tuple(items)
    labels = tuple(dict.fromkeys(label for e in (*knowledge, *items) for label in labels_of(e)))
    several = any(e.labels is not None and len(e.labels) != 1 for e in (*knowledge, *items))
    return Benchmark(
        name,
        knowledge,
        items,
        labels,
        several,
        metrics=(MacroF1(labels) if several else Accuracy(),),
        parse=LabelParser(multi_label=several),
    )


def fingerprint(data: Benchmark) -> str:
    """Of everything that is asked and everything that may be shown, in their order."""
    digest = hashlib.sha256()
    for example in (*data.items, *data.knowledge):
        query = example.query
        images = [image.sha256 for image in query.images]
        told = (query.text, images, query.choices, example.answer, example.rationale)
        # Two answers may be spelt like one, and tags say what may be shown to whom.
        apart = (labels_of(example), sorted(example.tags.items()))
        digest.update(repr((*told, *apart)).encode(errors="replace"))
    return digest.hexdigest()
