"""Score of a request: how likely the apprentice's answer is to agree with the master's."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.types import Answer, Candidate, Query

NEUTRAL_WEIGHT, PENALTY = 0.5, 2.0  # the weights without samples, and their strength
KIND_SAMPLES = 10.0  # samples of the overall rate that a kind's rate includes
STEPS = 400


class ScoreInputs(NamedTuple):
    """Inputs of the score of a request; None is missing. Before the answer: the similarity of the
    nearest and the least near demonstration, the share of the demonstrations with the most frequent
    answer, and the kind of question. After it: whether the answer is valid, its confidence, and the
    share of the demonstrations that it repeats."""

    nearest: float | None
    farthest: float | None
    shared: float | None
    kind: str
    valid: bool = True
    confidence: float | None = None
    repeated: float | None = None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return self.nearest, self.farthest, self.shared, self.confidence, self.repeated


def inputs_before(query: Query, found: Sequence[Candidate]) -> ScoreInputs:
    """Return the inputs that exist before the answer."""
    scores = [one.score for one in found]
    texts = [one.example.answer for one in found]
    shared = max(map(texts.count, texts)) / len(texts) if texts else None
    return ScoreInputs(max(scores, default=None), min(scores, default=None), shared, _kind(query))


def inputs_after(inputs: ScoreInputs, answer: Answer, found: Sequence[Candidate]) -> ScoreInputs:
    """Return the inputs with those of the apprentice's answer."""
    texts = [one.example.answer for one in found]
    repeated = texts.count(answer.text) / len(texts) if texts else None
    return inputs._replace(valid=answer.valid, confidence=answer.confidence, repeated=repeated)


def _kind(query: Query) -> str:
    """Return the form of the answer and the first word of the question."""
    first = query.text.split(maxsplit=1)[:1]
    form = "choices" if query.choices else "image" if query.images else "text"
    return f"{form} {first[0].casefold()}" if first else form


@dataclass(frozen=True)
class RiskScore:
    """Monotone score in [0, 1), fitted on comparisons and frozen.

    A logistic regression with weights of at least 0, so a higher input never lowers the score; its
    value is the rank among the scores of the samples. An invalid answer scores 0, and a missing
    input counts as average. `kinds` maps kinds of questions to logits of their agreement.
    """

    means: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    kinds: Mapping[str, float]
    other: float
    ranks: tuple[float, ...]

    @classmethod
    def fit(cls, inputs: Sequence[ScoreInputs], agrees: Sequence[bool]) -> Self:
        """Fit the score on compared requests. Raises `SettingError` without any."""
        if not inputs or len(inputs) != len(agrees):
            raise SettingError(
                f"inputs and agrees must have one entry a comparison, got {len(inputs)} and"
                f" {len(agrees)}",
                hint="pass the inputs and the outcome of each comparison",
            )
        numbers = np.array([one.numbers for one in inputs], np.float64)
        is_given = np.isfinite(numbers)
        counts = is_given.sum(0)
        sums = np.where(is_given, numbers, 0).sum(0)
        means = sums / np.maximum(counts, 1)
        spread = np.where(is_given, numbers - means, 0)
        scales = np.sqrt((spread**2).sum(0) / np.maximum(counts, 1))
        scales[scales < 1e-9] = 1.0
        kinds, other = _kind_logits([one.kind for one in inputs], agrees)
        kind = np.array([kinds.get(one.kind, other) for one in inputs])
        features = np.column_stack([spread / scales, kind])
        weights = _fit_weights(features, np.asarray(agrees, np.float64))
        ranks = np.sort(features @ weights)
        return cls(_floats(means), _floats(scales), _floats(weights), kinds, other, _floats(ranks))

    def __call__(self, inputs: ScoreInputs) -> float:
        if not inputs.valid:
            return 0.0
        value = self.weights[-1] * self.kinds.get(inputs.kind, self.other)
        for number, mean, scale, weight in zip(
            inputs.numbers, self.means, self.scales, self.weights, strict=False
        ):
            if number is not None:
                value += weight * (number - mean) / scale
        return bisect_right(self.ranks, value) / (len(self.ranks) + 1)

    @property
    def version(self) -> str:
        """Return the digest of the score: a certificate belongs to one version."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """Return the score as JSON values, for `restore`."""
        return asdict(self)

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Return the score of a state. Raises `SettingError`."""
        try:
            means, scales, weights, ranks = (
                _floats(state[name]) for name in ("means", "scales", "weights", "ranks")
            )
            kinds = {str(kind): float(value) for kind, value in state["kinds"].items()}
            return cls(means, scales, weights, kinds, float(state["other"]), ranks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingError(
                "the state is not that of a risk score", hint="fit a new score"
            ) from error


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _kind_logits(kinds: Sequence[str], agrees: Sequence[bool]) -> tuple[dict[str, float], float]:
    overall = (sum(agrees) + 1) / (len(agrees) + 2)
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for kind, agreed in zip(kinds, agrees, strict=True):
        by_kind[kind].append(agreed)
    logits = {}
    for kind, found in by_kind.items():
        rate = (sum(found) + KIND_SAMPLES * overall) / (len(found) + KIND_SAMPLES)
        logits[kind] = float(np.log(rate / (1 - rate)))
    return logits, float(np.log(overall / (1 - overall)))


def _fit_weights(features: NDArray[np.float64], agrees: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of a logistic regression, at least 0, penalized by their distance from
    `NEUTRAL_WEIGHT`: projected gradient steps of the size that the curvature allows."""
    weights, constant = np.full(features.shape[1], NEUTRAL_WEIGHT), 0.0
    with_constant = np.column_stack([features, np.ones(len(features))])
    step = 1 / (0.25 * np.linalg.norm(with_constant, 2) ** 2 + PENALTY)
    for _ in range(STEPS):
        error = agrees - 1 / (1 + np.exp(-(features @ weights + constant)))
        gradient = features.T @ error - PENALTY * (weights - NEUTRAL_WEIGHT)
        weights = np.maximum(weights + step * gradient, 0.0)
        constant += step * error.sum()
    return weights
