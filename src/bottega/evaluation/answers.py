"""Which answers an item takes, and whether an example gives one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.labels import is_passage
from bottega.evaluation.metrics.vqa import Annotated
from bottega.types import Example


def answers_of(data: Benchmark, item: Example) -> tuple[str, ...]:
    """All that its annotators said, where the benchmark's metrics know them."""
    for metric in data.metrics:
        if isinstance(metric, Annotated) and (said := metric.annotators(item)):
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
