"""Lexical search by BM25."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from bottega._util.identity import Exclude, is_excluded
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError, check_count
from bottega.protocols import Vectors
from bottega.retrieval.sources import ChangeFeed, ChangeFollower
from bottega.types import Candidate, Example, Query

Tokenizer = Callable[[str], list[str]]
WORD = re.compile(r"\w+")


class BM25Retriever:
    """Retriever of the k best examples by the BM25 score (Lucene's variant) of their text.

    `reads` returns the searched text of an example, by default its question, rationale and answer.
    Examples without a common word have score 0 and come last, oldest first. The first search after
    a change of the feed rebuilds the index, which takes about 50 microseconds per example. The
    default `words` keeps digits and single letters, which the tokenizer of bm25s drops: some
    questions are only "3 + 5". `exclude` is the rule for excluded examples: all that share an image
    with the query, or only the same question.
    """

    def __init__(
        self,
        feed: ChangeFeed,
        *,
        reads: Callable[[Example], str] | None = None,
        words: Tokenizer | None = None,
        k1: float = 1.5,
        b: float = 0.75,
        exclude: Exclude = "same-image",
    ) -> None:
        if not 0 <= k1 < math.inf or not 0 <= b <= 1:
            raise SettingError(
                f"k1 must be 0 or more and b between 0 and 1, got k1={k1} and b={b}",
                hint="set k1=1.5 and b=0.75",
            )
        self._feed = feed
        self._exclude = exclude
        self._follower = ChangeFollower(feed.changes, self._take)
        self._reads = reads or example_text
        self._words = words or tokenize
        self._settings = {"k1": k1, "b": b}
        self._documents: dict[str, list[str]] = {}
        self._index = _BM25Index({}, self._settings)
        self._follow_lock = Lock()

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        check_count("k", k)
        return await asyncio.to_thread(self._find, query, k)

    def _find(self, query: Query, k: int) -> list[Candidate]:
        index = self._current_index()
        while True:
            try:
                return self._best(index, query, k)
            except NotFoundError:  # deleted since the index was built
                before, index = index, self._current_index()
                if index is before:
                    raise

    def _best(self, index: _BM25Index, query: Query, k: int) -> list[Candidate]:
        scores = index.scores(self._words(query.text))
        order = np.argsort(-scores, kind="stable")
        found: list[Candidate] = []
        # One page at a time, because the best ones may include the query itself.
        for start in range(0, len(order), k):
            page = order[start : start + k].tolist()
            examples = self._feed.get_many([index.ids[position] for position in page])
            found += [
                Candidate(example, float(scores[position]))
                for position, example in zip(page, examples, strict=True)
                if not is_excluded(query, example, self._exclude)
            ]
            if len(found) >= k:
                break
        return found[:k]

    def _current_index(self) -> _BM25Index:
        with self._follow_lock:
            self._follower.follow()
            if not self._documents:
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )
            return self._index

    def _take(self, gone: Sequence[str], new: Sequence[str]) -> None:
        examples = self._feed.get_many(new) if new else []
        texts = [self._words(self._reads(example)) for example in examples]
        removed = set(gone)
        left = {id: words for id, words in self._documents.items() if id not in removed}
        documents = left | dict(zip(new, texts, strict=True))
        self._index = _BM25Index(documents, self._settings)
        self._documents = documents


class _BM25Index:
    """Immutable BM25 index of documents, shared by threads."""

    def __init__(self, documents: Mapping[str, list[str]], settings: Mapping[str, float]) -> None:
        self.ids: Sequence[str] = list(documents)
        self._index: Any = None
        if any(documents.values()):  # bm25s cannot index documents without any word
            import bm25s  # slow to import

            self._index = bm25s.BM25(method="lucene", **settings)
            self._index.index(list(documents.values()), show_progress=False)

    def scores(self, words: list[str]) -> Vectors:
        """Return one score per document."""
        if self._index is None or not words:
            return np.zeros(len(self.ids), np.float32)
        scores: Vectors = self._index.get_scores(words)
        return scores


def tokenize(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def example_text(example: Example) -> str:
    texts = (example.query.text, example.rationale or "", example.answer)
    return "\n".join(part for part in texts if part)
