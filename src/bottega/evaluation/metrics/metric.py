"""Interface of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.evaluation.metrics.intervals import Estimate
from bottega.types import Answer, Example


@dataclass(frozen=True)
class Judgement:
    """Item, its answer and the answer's score in [0, 1] (`Metric.score`)."""

    item: Example
    answer: Answer
    score: float


class Metric(Protocol):
    """Published metric; `name` identifies the variant.

    A metric holds further references (ten annotators' answers, ranges) by the item's query id. An
    invalid answer scores 0 unless the published metric differs.
    """

    @property
    def name(self) -> str: ...

    def score(self, item: Example, answer: Answer, /) -> float: ...

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        """Return the value over at least one item with its 95 % interval."""
        ...
