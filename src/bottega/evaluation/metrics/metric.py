"""What a metric is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.evaluation.metrics.intervals import Estimate
from bottega.types import Answer, Example


@dataclass(frozen=True)
class Judgement:
    """An item, what was answered and its score in [0, 1] (`Metric.score`)."""

    item: Example
    answer: Answer
    score: float


class Metric(Protocol):
    """How right an answer is, as published; `name` says which variant.

    What the gold answer alone does not say (ten annotators' answers, ranges) the metric holds, by
    the item's query id. An invalid answer scores 0 unless the published metric says otherwise.
    """

    @property
    def name(self) -> str: ...

    def score(self, item: Example, answer: Answer, /) -> float: ...

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        """The figure over at least one item, with its 95 % interval."""
        ...
