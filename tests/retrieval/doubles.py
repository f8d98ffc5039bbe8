"""Knowledge base in memory with a change log, and an embedder of words."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bottega._util.identity import is_excluded
from bottega.errors import NotFoundError, SettingError
from bottega.protocols import Vectors
from bottega.types import Candidate, Example, ExampleChange, Query
from tests.builders import ListPool, solid_image

DIMENSION = 16


class Words:
    """Embedder: unit sum of one random vector per word, or per image without a text."""

    fingerprint = "words-16"
    dimension = DIMENSION

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return np.stack([self._one(query) for query in queries])

    def _one(self, query: Query) -> Vectors:
        parts = query.text.split() or [image.sha256 for image in query.images]
        total = np.sum([_random(part) for part in parts], axis=0)
        return np.asarray(total / np.linalg.norm(total), np.float32)


class WordTokens:
    """Multi-vector embedder: one unit vector per word, as in `Words`."""

    fingerprint = "word-tokens-16"
    dimension = DIMENSION

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return [np.stack([_random(word) for word in query.text.split()]) for query in queries]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self.embed_queries(queries)


class Memory:
    """Knowledge base in memory that searches by `embed` and logs its changes."""

    def __init__(self, examples: Sequence[Example] = ()) -> None:
        self.embed = Words()
        self.examples: dict[str, Example] = {}
        self.log: list[ExampleChange] = []
        self.add(examples)

    def add(self, examples: Sequence[Example]) -> None:
        for example in examples:
            self.examples[str(example.id)] = example
            self.log.append(ExampleChange(len(self.log) + 1, str(example.id)))

    def delete(self, ids: Sequence[str]) -> None:
        for id in ids:
            del self.examples[id]
            self.log.append(ExampleChange(len(self.log) + 1, id, deleted=True))

    def changes(self, since: int, /) -> list[ExampleChange]:
        return self.log[since:]

    def ids(self) -> Sequence[str]:
        return list(self.examples)

    def ids_by_label(self) -> Mapping[str, Sequence[str]]:
        return ListPool(list(self.examples.values())).ids_by_label()

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        gone = [id for id in ids if id not in self.examples]
        if gone:
            raise NotFoundError(f"no example has the id {gone[0]!r}", hint="look again")
        return [self.examples[id] for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        return self.embed.embed([example.query for example in self.get_many(ids)])

    def search(
        self, query: Query, k: int, *, within: Collection[str] | None = None
    ) -> list[Candidate]:
        if k < 1:  # as the knowledge base does
            raise SettingError(f"k must be at least 1, got {k}", hint="use k >= 1")
        return self._nearest(self.embed.embed([query])[0], k, query, within)

    def nearest(
        self, vectors: Vectors, k: int, *, excluded_for: Sequence[Query]
    ) -> list[list[Candidate]]:
        pairs = zip(vectors, excluded_for, strict=True)
        return [self._nearest(vector, k, query, None) for vector, query in pairs]

    def _nearest(
        self, vector: Vectors, k: int, query: Query, within: Collection[str] | None
    ) -> list[Candidate]:
        found = [
            Candidate(example, float(self.embed.embed([example.query])[0] @ vector))
            for id, example in self.examples.items()
            if (within is None or id in set(within)) and not is_excluded(query, example)
        ]
        return sorted(found, key=lambda candidate: -candidate.score)[:k]


def labelled_text(text: str, answer: str, shade: int) -> Example:
    id = f"entry-{shade:04}"
    return Example(Query(text, (solid_image(shade),), id=id), answer, id=id)


def about(topic: str, count: int, start: int = 0) -> list[Example]:
    """Entries whose questions share one word."""
    return [labelled_text(f"{topic} number {i}", topic, i) for i in range(start, start + count)]


def _random(word: str) -> Vectors:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8])
    return np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
