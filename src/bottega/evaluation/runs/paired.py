"""Paired differences: two methods on the same items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega import notebook
from bottega.errors import SettingError
from bottega.evaluation.methods.specifications import METHODS, REFERENCE
from bottega.evaluation.metrics.metric import (
    Estimate,
    NotScored,
    mcnemar,
    paired_difference,
    paired_mean_difference,
    sign_flips,
)
from bottega.evaluation.outcomes import ScoredAnswer, method_title
from bottega.evaluation.runs.runner import MethodResult

ScoredRun = tuple[MethodResult, Sequence[ScoredAnswer]]


@dataclass(frozen=True)
class PairedDifference:
    """Mean score of `method` minus that of `against`, on the `n` items that both answered.

    The 95 % interval and the p-value are Newcombe's and McNemar's if every score is 0 or 1, else
    the bootstrap's and a permutation test's.
    """

    method: str
    against: str
    shots: int
    n: int
    value: float
    low: float
    high: float
    p_value: float

    def _repr_html_(self) -> str:
        return notebook.render("difference", self)


def paired_differences(runs: Sequence[ScoredRun], *, seed: int = 0) -> list[PairedDifference]:
    """Compare methods with their baselines, the differences to `REFERENCE` first.

    Both have the same number of shots. A method with a single number of shots is compared at each
    number of the other method. Any other two runs are compared as the second with the first.
    Metrics of a whole set (macro-F1) and `NotScored` have no pairs. Raises `SettingError` if two
    runs have different items.
    """
    unpaired = ("macro", NotScored.name)
    paired = [(r, scored) for r, scored in runs if not r.metric.startswith(unpaired)]
    by_name = {(r.method, r.shots): scored for r, scored in paired}
    compared = [
        compare(method, against, max(shots, other), scored, by_name[against, other], seed)
        for (method, shots), scored in by_name.items()
        for against in _baselines(method)
        for other in _shots(method, shots, against, by_name)
    ]
    if not any(compared) and len(paired) == len(runs) == 2:
        compared = [_compare_two(paired[0], paired[1], seed)]
    return sorted(filter(None, compared), key=is_other_baseline)


def _compare_two(first: ScoredRun, second: ScoredRun, seed: int) -> PairedDifference | None:
    (result, scored), (other, others) = first, second
    items = {one.index: one.item.query for one in scored}
    if any(one.item.query != items.get(one.index, one.item.query) for one in others):
        raise SettingError(
            f"the runs of {result.method} and {other.method} have different items",
            hint="evaluate both with the same benchmark, seed and limit",
        )
    names = [one.method for one in (other, result)]
    if other.method == result.method:
        names = [method_title(one.method, one.shots) for one in (other, result)]
    shots = max(other.shots, result.shots)
    return compare(names[0], names[1], shots, others, scored, seed)


def is_other_baseline(one: PairedDifference) -> bool:
    """Sort key that puts differences to `REFERENCE` first and keeps the order of the others."""
    return one.against != REFERENCE


def _baselines(method: str) -> list[str]:
    spec = METHODS.get(method)
    return [] if spec is None else [name for name in spec.baselines if name != method]


def _shots(method: str, shots: int, against: str, runs: Iterable[tuple[str, int]]) -> list[int]:
    """Return the baseline's numbers of shots to compare with."""
    available = [other for name, other in runs if name == against]
    if METHODS[against].shots is not None or METHODS[method].shots is not None:
        return available
    return [shots] if shots in available else []


def compare(
    method: str,
    against: str,
    shots: int,
    ours: Sequence[ScoredAnswer],
    theirs: Sequence[ScoredAnswer],
    seed: int,
) -> PairedDifference | None:
    """Compare two methods; return None if they have no answered item in common."""
    both = _both(ours, theirs)
    if not both:
        return None
    gain, p_value = difference([a for a, _ in both], [b for _, b in both], seed=seed)
    return PairedDifference(
        method, against, shots, len(both), gain.value, gain.low, gain.high, p_value
    )


def difference(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int
) -> tuple[Estimate, float]:
    """Return our mean score minus theirs on the same items, and the p-value."""
    if all(score in (0.0, 1.0) for score in (*ours, *theirs)):
        right = [[score == 1.0 for score in scores] for scores in (ours, theirs)]
        return paired_difference(*right), mcnemar(*right)
    gain = paired_mean_difference(ours, theirs, seed=seed)
    return gain, sign_flips(ours, theirs, seed=seed)


def _both(
    ours: Sequence[ScoredAnswer], theirs: Sequence[ScoredAnswer]
) -> list[tuple[float, float]]:
    """Return both scores of each item that both answered.

    Items are matched by their index: two items may ask the same question.
    """
    scores = {one.index: one.score for one in theirs}
    return [(one.score, scores[one.index]) for one in ours if one.index in scores]
