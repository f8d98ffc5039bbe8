"""One answer out of several samples: baselines that may spend as much as a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bottega.types import Answer


def most_frequent(answers: Sequence[Answer]) -> Answer:
    """Self-consistency: what most samples say, its confidence their share. Of several the one that
    was said first; invalid samples count for nothing, unless there are no others."""
    valid = [answer for answer in answers if answer.valid]
    if not valid:
        return answers[0]
    votes = Counter(_said(answer) for answer in valid)
    said, count = votes.most_common(1)[0]
    chosen = next(answer for answer in valid if _said(answer) == said)
    return replace(chosen, confidence=count / len(answers))


def most_confident(answers: Sequence[Answer]) -> Answer:
    """Best of n by the model's own confidence, stated or the probability of its tokens; the first
    where there is none."""
    return max(answers, key=lambda answer: (answer.valid, answer.confidence or 0.0))


def _said(answer: Answer) -> tuple[str, ...]:
    """Texts without labels are compared up to case and spacing."""
    return answer.labels or (" ".join(answer.text.casefold().split()),)
