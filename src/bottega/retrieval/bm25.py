"""Lexical search: which examples share rare words with the question."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from bottega.errors import EmptyKnowledgeBaseError, LogPrunedError, NotFoundError, SettingError
from bottega.exclusion import Exclude, is_excluded
from bottega.protocols import Vectors
from bottega.retrieval.ports import ChangeFeed, ChangeReader, ExampleCollection
from bottega.types import Candidate, Example, ExampleChange, Query

ChangeHandler = Callable[[Sequence[str], Sequence[str]], None]


class StaticExamples:
    """A pool that does not change, as a feed."""

    def __init__(self, pool: ExampleCollection) -> None:
        self._pool = pool

    def changes(self, since: int, /) -> list[ExampleChange]:
        ids = list(self._pool.ids())[since:]
        return [ExampleChange(since + place, id) for place, id in enumerate(ids, start=1)]

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        return self._pool.get_many(ids)


class ChangeFollower:
    """Reads a change log from where it last stopped. Not safe for two threads at once.

    `take(gone, new)` is given what changed, reads of the new ones what it wants and learns it.
    `gone` must be forgotten before `new` is learnt: an id that went and came back is in both. What
    fails in it is told again the next time, so it reads before it changes anything.
    """

    def __init__(self, changes: ChangeReader, take: ChangeHandler) -> None:
        self._changes = changes
        self._take = take
        self._seq = 0
        self._held: set[str] = set()

    def follow(self) -> int:
        """How many ids there was news of.

        What is deleted while it is read is looked up again: the news are those of one moment.
        """
        while True:
            changes, forgotten = self._told()
            if not changes and not forgotten:
                return 0
            last: dict[str, ExampleChange] = {}
            for change in changes:
                last.pop(change.id, None)  # what came back is the newest
                last[change.id] = change
            new = [id for id, change in last.items() if not change.deleted]
            gone = [*forgotten, *last]
            upto = changes[-1].seq if changes else 0
            try:
                self._take(gone, new)
            except NotFoundError:
                if not any(True for _ in self._changes(upto)):
                    raise
                continue
            # Only now: what was not learnt must be told again.
            self._seq = upto
            self._held = self._held.difference(gone).union(new)
            return len(gone)

    def _told(self) -> tuple[list[ExampleChange], list[str]]:
        """What is new in the log, and the ids held of which it tells nothing any more."""
        try:
            return list(self._changes(self._seq)), []
        except LogPrunedError:
            changes = list(self._changes(0))
            return changes, sorted(self._held.difference(change.id for change in changes))


Tokenizer = Callable[[str], list[str]]
WORD = re.compile(r"\w+")


class BM25Retriever:
    """The k examples whose text shares most with the question's, by BM25 as Lucene scores it.

    `reads` says which text of an example is searched; by default its question, rationale and
    answer. Examples that share no word have score 0 and come last, oldest first. A search sees
    what the feed has seen: the first one after a change rebuilds the index, at about 50
    microseconds an example. The default `words` keeps digits and single letters, which bm25s's own
    tokenizer drops: "3 + 5" is all that some questions say. `exclude` is the rule for excluded
    examples: all that share an image with the query, or only the same question.
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
            raise SettingError(f"BM25 with k1 {k1} and b {b}", hint="use k1=1.5 and b=0.75")
        self._feed = feed
        self._exclude = exclude
        self._follower = ChangeFollower(feed.changes, self._take)
        self._reads = reads or example_text
        self._words = words or tokenize
        self._settings = {"k1": k1, "b": b}
        self._documents: dict[str, list[str]] = {}
        self._lexicon = _BM25Index({}, self._settings)
        self._following = Lock()

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        if k < 1:
            raise SettingError(f"cannot search for {k} examples", hint="use k >= 1")
        return await asyncio.to_thread(self._find, query, k)

    def _find(self, query: Query, k: int) -> list[Candidate]:
        lexicon = self._caught_up()
        while True:
            try:
                return self._best(lexicon, query, k)
            except NotFoundError:  # deleted since
                before, lexicon = lexicon, self._caught_up()
                if lexicon is before:
                    raise

    def _best(self, lexicon: _BM25Index, query: Query, k: int) -> list[Candidate]:
        scores = lexicon.scores(self._words(query.text))
        order = np.argsort(-scores, kind="stable")
        found: list[Candidate] = []
        # A page at a time: the query itself may be among the best.
        for start in range(0, len(order), k):
            page = order[start : start + k].tolist()
            examples = self._feed.get_many([lexicon.ids[place] for place in page])
            found += [
                Candidate(example, float(scores[place]))
                for place, example in zip(page, examples, strict=True)
                if not is_excluded(query, example, self._exclude)
            ]
            if len(found) >= k:
                break
        return found[:k]

    def _caught_up(self) -> _BM25Index:
        with self._following:
            self._follower.follow()
            if not self._documents:
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )
            return self._lexicon

    def _take(self, gone: Sequence[str], new: Sequence[str]) -> None:
        examples = self._feed.get_many(new) if new else []
        said = [self._words(self._reads(example)) for example in examples]
        away = set(gone)
        left = {id: words for id, words in self._documents.items() if id not in away}
        documents = left | dict(zip(new, said, strict=True))
        self._lexicon = _BM25Index(documents, self._settings)
        self._documents = documents


class _BM25Index:
    """An index of documents as they are now. Not changed afterwards: threads share it."""

    def __init__(self, documents: Mapping[str, list[str]], settings: Mapping[str, float]) -> None:
        self.ids: Sequence[str] = list(documents)
        self._index: Any = None
        if any(documents.values()):  # bm25s cannot index documents that have no word at all
            import bm25s  # slow to load, and needed here alone

            self._index = bm25s.BM25(method="lucene", **settings)
            self._index.index(list(documents.values()), show_progress=False)

    def scores(self, words: list[str]) -> Vectors:
        """One of each document."""
        if self._index is None or not words:
            return np.zeros(len(self.ids), np.float32)
        scores: Vectors = self._index.get_scores(words)
        return scores


def tokenize(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def example_text(example: Example) -> str:
    said = (example.query.text, example.rationale or "", example.answer)
    return "\n".join(part for part in said if part)
