"""Results of Visual RAG in a report: the average row of its Table 2, and its Figure 4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.metrics.metric import Estimate, resampled
from bottega.evaluation.report.sections import SET_METRICS, ReportRow, Section

MANY_SHOT = ("random", "balanced")
RETRIEVED = ("visual-rag", "top-k")


@dataclass(frozen=True)
class AverageRow:
    """Best value of a method over its numbers of shots in each section, None where it did not run.
    `average` is None unless it ran in each section."""

    method: str
    best: tuple[float | None, ...]

    @property
    def average(self) -> float | None:
        found = [value for value in self.best if value is not None]
        return sum(found) / len(found) if len(found) == len(self.best) else None


def average_rows(sections: Sequence[Section]) -> list[AverageRow]:
    """Return a row for each method that ran in two sections or more. The best number of shots is
    chosen on the evaluated items, as in the paper."""
    answered = [section for section in sections if section.rows]
    if len(answered) < 2:
        return []
    best = [_best_values(section) for section in answered]
    methods = dict.fromkeys(name for values in best for name in values)
    rows = [AverageRow(name, tuple(values.get(name) for values in best)) for name in methods]
    return [row for row in rows if sum(value is not None for value in row.best) > 1]


def _best_values(section: Section) -> dict[str, float]:
    values: dict[str, float] = {}
    for row in section.rows:
        if row.result.value is not None:
            name = row.result.method
            values[name] = max(values.get(name, 0.0), row.result.value)
    return values


@dataclass(frozen=True)
class Efficiency:
    """Fewest retrieved demonstrations that match the best result of sampled ones (Fig. 4).

    `ratio` is `shots` / `many_shots`, `gain` the difference of their scores. If no number of shots
    matches (`matched` is False), `shots` is the number of the best retrieved result. Intervals are
    a bootstrap over items, which repeats the choice of both numbers.
    """

    method: str
    many_shot: str
    shots: int
    many_shots: int
    matched: bool
    ratio: Estimate
    gain: Estimate


def efficiency(section: Section) -> list[Efficiency]:
    """Compare each method that retrieves with each one that samples, in the first run, over the
    items that all of their rows answered. Return nothing for metrics of whole sets."""
    if section.metric.startswith(SET_METRICS):
        return []
    first = next(iter(section.runs), "")
    found = []
    for method in RETRIEVED:
        for many in MANY_SHOT:
            ours, theirs = (_by_shots(section.rows, first, name) for name in (method, many))
            if ours and theirs:
                found.append(_compared(method, many, ours, theirs))
    return found


def _by_shots(rows: Sequence[ReportRow], run: str, method: str) -> dict[int, ReportRow]:
    return {
        row.result.shots: row
        for row in rows
        if row.run == run and row.result.method == method and row.answers
    }


def _compared(
    method: str, many: str, ours: Mapping[int, ReportRow], theirs: Mapping[int, ReportRow]
) -> Efficiency:
    rows = [*ours.values(), *theirs.values()]
    items = sorted(set.intersection(*(set(row.answers) for row in rows)))
    own, other = (_scores(some.values(), items) for some in (ours, theirs))
    shots, many_shots = np.array(list(ours)), np.array(list(theirs))
    weights = np.vstack([np.ones(len(items)), resampled(len(items), seed=0)]) / max(1, len(items))
    picked = [_choice(shots, one @ own.T, many_shots, one @ other.T) for one in weights]
    values = np.array([(at[0] / at[1], at[2]) for at in picked])
    low, high = np.percentile(values[1:], [2.5, 97.5], axis=0)
    estimates = [Estimate(*map(float, one)) for one in zip(values[0], low, high, strict=True)]
    return Efficiency(
        method, many, int(picked[0][0]), int(picked[0][1]), picked[0][2] >= 0, *estimates
    )


def _scores(rows: Iterable[ReportRow], items: Sequence[int]) -> NDArray[np.float64]:
    return np.array([[row.answers[index].scored.score for index in items] for row in rows])


def _choice(
    shots: NDArray[np.intp],
    values: NDArray[np.float64],
    many_shots: NDArray[np.intp],
    many_values: NDArray[np.float64],
) -> tuple[float, float, float]:
    """Return our shots, their best shots and the gain. Our shots are the fewest that match their
    best result, else those of our best result."""
    best = int(many_values.argmax())
    matching = np.flatnonzero(values >= many_values[best] - 1e-12)
    at = matching[shots[matching].argmin()] if len(matching) else values.argmax()
    return float(shots[at]), float(many_shots[best]), float(values[at] - many_values[best])
