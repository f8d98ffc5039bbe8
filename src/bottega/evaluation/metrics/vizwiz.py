"""VizWiz: VQA accuracy, and whether a question is known to have no answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.metrics.intervals import Estimate, resampled
from bottega.evaluation.metrics.metric import Judged
from bottega.evaluation.metrics.vqa import Annotated, References, leave_one_out
from bottega.evaluation.metrics.vqa_text import normalised
from bottega.types import Answer, Example

UNANSWERABLE = "unanswerable"


def vizwiz_accuracy(references: References) -> Annotated:
    """VQA accuracy by VizWiz's own code: the answer is normalised, the annotators' never are."""
    return Annotated("vizwiz_accuracy", references, _agreement)


def _agreement(said: str, golds: Sequence[str], /) -> float:
    return leave_one_out(list(golds).count(normalised(said)), len(golds))


class Answerability:
    """Average precision (`ap`) or F1 of finding the unanswerable questions, whose query ids are
    given. An item's own score is whether it was told apart rightly.

    "unanswerable" is what says so. Average precision ranks by the confidence too: a sure
    "unanswerable" first, a sure other answer last, answers without a confidence count as sure. An
    invalid reply counts as the wrong side, surely. Without an unanswerable item both are 0.
    """

    def __init__(self, unanswerable: Collection[str], figure: Literal["ap", "f1"] = "ap") -> None:
        self.name = f"answerability_{figure}"
        self._unanswerable = unanswerable
        self._figure = _average_precision if figure == "ap" else _f1

    def score(self, item: Example, answer: Answer, /) -> float:
        return float((self._suspicion(item, answer) > 0) == self._is_positive(item))

    def estimate(self, judged: Sequence[Judged], /, *, seed: int) -> Estimate:
        positive = np.array([self._is_positive(one.item) for one in judged], np.float64)
        suspicion = np.array([self._suspicion(one.item, one.answer) for one in judged])
        value = self._figure(positive, suspicion, np.ones((1, len(judged))))[0]
        drawn = self._figure(positive, suspicion, resampled(len(judged), seed))
        low, high = np.percentile(drawn, [2.5, 97.5])
        return Estimate(float(value), float(low), float(high))

    def _is_positive(self, item: Example) -> bool:
        return item.query.id in self._unanswerable

    def _suspicion(self, item: Example, answer: Answer) -> float:
        """From 1, surely unanswerable, to -1."""
        if not answer.valid:
            return -1.0 if self._is_positive(item) else 1.0
        sure = 1.0 if answer.confidence is None else max(answer.confidence, np.finfo(float).tiny)
        return sure if normalised(answer.text) == UNANSWERABLE else -sure


def _f1(
    positive: NDArray[np.float64], suspicion: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """One value for each row of item weights, as below."""
    said = (suspicion > 0).astype(np.float64)
    both, either = weights @ (positive * said), weights @ (positive + said)
    return np.divide(2 * both, either, out=np.zeros_like(both), where=either > 0)


def _average_precision(
    positive: NDArray[np.float64], suspicion: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Equal suspicions are one step of the curve, so their order does not matter."""
    order = np.argsort(-suspicion, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(suspicion[order])), len(order) - 1)
    return np.array([_area(positive[order], row[order], ends) for row in weights])


def _area(
    positive: NDArray[np.float64], weights: NDArray[np.float64], ends: NDArray[np.intp]
) -> float:
    found, seen = np.cumsum(weights * positive)[ends], np.cumsum(weights)[ends]
    if found[-1] == 0:
        return 0.0
    precision = np.divide(found, seen, out=np.zeros_like(found), where=seen > 0)
    return float(np.sum(np.diff(found, prepend=0.0) * precision) / found[-1])
