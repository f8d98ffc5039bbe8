"""Classifier without a model: the votes of retrieved examples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from bottega.evaluation.metrics.metric import labels_of
from bottega.knowledge.metric import MEAN_COUNT
from bottega.types import Answer, Candidate

# Of a softmax over cosine similarities; accuracy is flat between 0.05 and 0.2 (benchmarks/log).
TEMPERATURE = 0.1

Weights = Mapping[str, float]
Vote = Callable[..., Answer]


def nearest_label(candidates: Sequence[Candidate], *, multi_label: bool = False) -> Answer:
    """Return the label, or with `multi_label` all labels, of the most similar example."""
    if not candidates:
        return no_label("no examples")
    labels = labels_of(_by_similarity(candidates)[0].example)
    chosen = labels if multi_label else labels[:1]
    return Answer(", ".join(chosen), labels=chosen)


def vote(candidates: Sequence[Candidate], *, multi_label: bool = False) -> Answer:
    """Return the majority label; a tie goes to the label with the nearest example.

    Multi-label: every label that more than half of the examples have.
    """
    ordered = _by_similarity(candidates)
    return _elected(ordered, [1.0] * len(ordered), multi_label)


def strict_vote(candidates: Sequence[Candidate], *, multi_label: bool = False) -> Answer:
    """Return the majority label; a tie is invalid, as in the retriever-only ablation of the paper
    (Visual RAG, Table 2). The text of a tie is "(tie)", because "tie" may be an answer."""
    if not multi_label and _is_tied(candidates):
        return no_label("tie")
    return vote(candidates, multi_label=multi_label)


def knn(
    candidates: Sequence[Candidate], *, multi_label: bool = False, exponent: float = 1.0
) -> Answer:
    """Return the label with the largest sum of exp(similarity / TEMPERATURE).

    A tie goes to the label with the nearest example. Multi-label: every label with more than half
    of the weight. The temperature suits cosines: with scores of a smaller range this approaches
    `vote`, with scores of a larger range `nearest_label`. The confidence is the share of the label
    among all shares, each to the power `exponent` (`fitted_vote.calibrate`).
    """
    ordered = _by_similarity(candidates)
    best = ordered[0].score if ordered else 0.0
    weights = [math.exp((one.score - best) / TEMPERATURE) for one in ordered]
    return _elected(ordered, weights, multi_label, exponent)


def with_means(found: Sequence[Candidate], means: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates and the class means, each of which counts in `knn` as `MEAN_COUNT`
    examples of its similarity."""
    more = TEMPERATURE * math.log(MEAN_COUNT)
    return [*found, *(replace(one, score=one.score + more) for one in means)]


VOTES: dict[str, Vote] = {
    "vote": vote,
    "vote-strict": strict_vote,
    "nearest": nearest_label,
    "knn": knn,
}


def _by_similarity(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by similarity, highest first; equal scores keep the order of the retriever."""
    return sorted(candidates, key=lambda one: -one.score)


def _elected(
    ordered: Sequence[Candidate],
    weights: Sequence[float],
    multi_label: bool,
    exponent: float = 1.0,
) -> Answer:
    if not ordered:
        return no_label("no examples")
    sums, total = _summed(ordered, weights), math.fsum(weights)
    if multi_label:
        chosen = tuple(label for label, weight in sums.items() if 2 * weight > total)
        return Answer(", ".join(chosen), labels=chosen)
    label = max(sums, key=lambda one: sums[one])  # max returns the first of equals, the nearest
    powers = math.fsum((one / sums[label]) ** exponent for one in sums.values())
    return Answer(label, labels=(label,), confidence=1 / powers)


def _summed(ordered: Sequence[Candidate], weights: Sequence[float]) -> Weights:
    """Return the total weight of each label, labels of nearer examples first."""
    parts: dict[str, list[float]] = defaultdict(list)
    for candidate, weight in zip(ordered, weights, strict=True):
        for label in labels_of(candidate.example):
            parts[label].append(weight)
    return {label: math.fsum(some) for label, some in parts.items()}


def _is_tied(candidates: Sequence[Candidate]) -> bool:
    counts = sorted(_summed(candidates, [1.0] * len(candidates)).values(), reverse=True)
    return any(first == second for first, second in pairwise(counts[:2]))


def no_label(reason: str) -> Answer:
    """Return an invalid answer whose text is the reason in brackets."""
    return Answer(f"({reason})", valid=False)
