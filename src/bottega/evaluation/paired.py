"""Two methods on the same items: what one adds to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bottega.evaluation.baselines import NEAREST
from bottega.evaluation.metrics.intervals import (
    Estimate,
    mcnemar,
    paired_difference,
    paired_mean_difference,
    sign_flips,
)
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.racc_methods import CONCAT, FLAT, RACC, SWAPPED
from bottega.evaluation.runner import Result
from bottega.evaluation.search_methods import BEST, RANDOM, SEARCHED, TREE

RETRIEVING = ("visual-rag", "top-k", "majority", "best-of-n", *SEARCHED)
AGAINST = ("vote", NEAREST, "knn", "top-k", "random", "zero-shot")
FIXED_SHOTS = {"zero-shot": 0, NEAREST: 1}  # methods with one fixed number of shots
# What spends as much as the tree search.
AS_DEAR = ("majority", "best-of-n", RANDOM, BEST)
# What compression may lose, and what says whether it reads.
CONTROLS = (CONCAT, FLAT, SWAPPED, "zero-shot")


@dataclass(frozen=True)
class PairedDifference:
    """`value` is the mean score of `method` less that of `against`, on the `n` items that both
    answered, with its 95 % interval and p-value: Newcombe's and McNemar's where every score is 0
    or 1, else the bootstrap's and a permutation test's."""

    method: str
    against: str
    shots: int
    n: int
    value: float
    low: float
    high: float
    p_value: float


def paired(
    runs: Sequence[tuple[Result, Sequence[ScoredAnswer]]], *, seed: int = 0
) -> list[PairedDifference]:
    """Compare retrieving and compressing methods with their baselines at the same number of shots,
    or at the baseline's only one.
    Sets that are scored as a whole (macro-F1) have no such pairs."""
    by_name = {
        (r.method, r.shots): scored for r, scored in runs if not r.metric.startswith("macro")
    }
    return [
        compared
        for (method, shots), scored in by_name.items()
        for against in _compared(method)
        if method != against
        for theirs in [by_name.get((against, FIXED_SHOTS.get(against, shots)))]
        if theirs is not None
        if (compared := compare(method, against, shots, scored, theirs, seed)) is not None
    ]


def _compared(method: str) -> tuple[str, ...]:
    if method == RACC:
        return CONTROLS
    if method not in RETRIEVING:
        return ()
    return (*AGAINST, *AS_DEAR) if method == TREE else AGAINST


def compare(
    method: str,
    against: str,
    shots: int,
    ours: Sequence[ScoredAnswer],
    theirs: Sequence[ScoredAnswer],
    seed: int,
) -> PairedDifference | None:
    """None if no item was answered by both."""
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
    """Our mean score less theirs on the same items, and the p-value."""
    if all(score in (0.0, 1.0) for score in (*ours, *theirs)):
        right = [[score == 1.0 for score in scores] for scores in (ours, theirs)]
        return paired_difference(*right), mcnemar(*right)
    gain = paired_mean_difference(ours, theirs, seed=seed)
    return gain, sign_flips(ours, theirs, seed=seed)


def _both(
    ours: Sequence[ScoredAnswer], theirs: Sequence[ScoredAnswer]
) -> list[tuple[float, float]]:
    """The scores of each item that both answered; an item is its place in the benchmark, because
    another one may ask the same."""
    known = {one.place: one.score for one in theirs}
    return [(one.score, known[one.place]) for one in ours if one.place in known]
