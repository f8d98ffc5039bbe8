"""Keywords without a model: the words that are frequent here and rare elsewhere."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable

from bottega.errors import SettingError
from bottega.retrieval.bm25 import plain_words


class DistinctiveTerms:
    """The terms of a text with the highest TF-IDF, up to `longest` words each.

    `corpus` are the texts that tell which terms are common; without it the most frequent terms win,
    earlier ones first. A term that the corpus lacks counts as rarest: a new topic is announced by
    new words. Lucene's 33 English stop words are left out and no others, because "how many" and
    "where" are what some questions ask.
    """

    def __init__(self, corpus: Iterable[str] = (), *, count: int = 10, longest: int = 2) -> None:
        if count < 1 or longest < 1:
            raise SettingError(
                f"{count} terms of up to {longest} words", hint="both must be 1 or more"
            )
        self._count = count
        self._longest = longest
        self._texts = 0
        self._containing: Counter[str] = Counter()
        for text in corpus:
            self._texts += 1
            self._containing.update(set(_terms(text, longest)))

    async def __call__(self, text: str, /) -> tuple[str, ...]:
        return await asyncio.to_thread(self.of, text)

    def of(self, text: str) -> tuple[str, ...]:
        """The same for code without an event loop."""
        frequency = Counter(_terms(text, self._longest))
        ranked = sorted(frequency, key=lambda term: -frequency[term] * self._rarity(term))
        return tuple(ranked[: self._count])

    def _rarity(self, term: str) -> float:
        """Smooth inverse document frequency, as scikit-learn defines it."""
        return math.log((1 + self._texts) / (1 + self._containing[term])) + 1


def _terms(text: str, longest: int) -> list[str]:
    """Single words first, then pairs and so on, none of them across a stop word."""
    from bm25s.stopwords import STOPWORDS_EN  # slow to load

    words = plain_words(text)
    runs = [
        words[start : start + length]
        for length in range(1, longest + 1)
        for start in range(len(words) - length + 1)
    ]
    return [" ".join(run) for run in runs if not set(run) & set(STOPWORDS_EN)]
