"""Two methods on the same items: what one adds to the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bottega.evaluation.metrics.intervals import mcnemar, paired_difference
from bottega.evaluation.runner import Result, Scored

PAIRS = (("visual-rag", "vote"),)


@dataclass(frozen=True)
class Paired:
    """`value` is the accuracy of `method` less that of `against`, on the `n` items that both
    answered, with the 95 % interval of that difference and the p-value of McNemar's test."""

    method: str
    against: str
    shots: int
    n: int
    value: float
    low: float
    high: float
    p_value: float


def paired(runs: Sequence[tuple[Result, Sequence[Scored]]]) -> list[Paired]:
    """Every pair that was run at the same number of shots and is scored by accuracy."""
    by_name = {(r.method, r.shots): scored for r, scored in runs if r.metric == "accuracy"}
    return [
        compared
        for (name, shots), scored in by_name.items()
        for method, against in PAIRS
        if name == method and (against, shots) in by_name
        if (compared := _compare(method, against, shots, scored, by_name[against, shots]))
    ]


def _compare(
    method: str,
    against: str,
    shots: int,
    ours: Sequence[Scored],
    theirs: Sequence[Scored],
) -> Paired | None:
    """None if no item was answered by both."""
    both = _both(ours, theirs)
    if not both:
        return None
    answers = [a for a, _ in both], [b for _, b in both]
    gain = paired_difference(*answers)
    p_value = mcnemar(*answers)
    return Paired(method, against, shots, len(both), gain.value, gain.low, gain.high, p_value)


def _both(ours: Sequence[Scored], theirs: Sequence[Scored]) -> list[tuple[bool, bool]]:
    """Who was right, on each item that both answered: on the very same item, because another one
    may ask the same. Items that stand twice in a benchmark are paired in order."""
    known: defaultdict[int, deque[bool]] = defaultdict(deque)
    for one in theirs:
        known[id(one.item)].append(one.correct)
    return [(one.correct, known[id(one.item)].popleft()) for one in ours if known[id(one.item)]]
