"""Abstention for queries that are unlike every example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bottega.protocols import Vectors
from bottega.types import Candidate

MIN_EXAMPLES = 50  # fewer examples cannot estimate a low quantile
FALSE_UNKNOWN = 0.01  # share of familiar queries that are rejected by mistake
AVERAGED = 10  # candidates in the mean similarity


@dataclass(frozen=True)
class NoveltyGate:
    """Gate that withholds demonstrations from queries that are unlike every example.

    A model that answers "unknown" without demonstrations then abstains.

    `similarities` (n, k) holds the scores of the nearest other examples, best first, for n stored
    examples (`KnowledgeBase.leave_one_out_scores`). A query is novel if the mean score of its
    nearest candidates is below the `quantile` of the examples' own means; about that share of
    familiar queries is rejected by mistake. With fewer than 50 examples no query is novel.
    """

    similarities: Vectors
    quantile: float = FALSE_UNKNOWN
    _thresholds: dict[int, float] = field(default_factory=dict)

    def shows(self, candidates: Sequence[Candidate]) -> bool:
        count = min(len(candidates), AVERAGED, self.similarities.shape[1])
        if count == 0 or len(self.similarities) < MIN_EXAMPLES:
            return True
        if count not in self._thresholds:
            means = self.similarities[:, :count].mean(axis=1)
            self._thresholds[count] = float(np.quantile(means, self.quantile))
        nearest = sorted((one.score for one in candidates), reverse=True)[:count]
        mean: float = sum(nearest) / count
        return mean >= self._thresholds[count]
