"""Retriever that searches the query's group of a hashtag tree."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread

import numpy as np

from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError
from bottega.protocols import Embedder, Vectors
from bottega.retrieval.hashtag_tree import HashtagTree
from bottega.retrieval.sources import ChangeFollower, ChangeReader, FilteredSearch, VectorLookup
from bottega.types import Candidate, Query

log = logging.getLogger(__name__)

# An embedding computed again may differ in its last digits; one of another space differs a lot.
TOLERANCE = 0.1
# Number of changes before a failed re-fit is tried again.
AGAIN_AFTER = 64


class HashtagRetriever:
    """Retriever of the k nearest examples in the query's level-1 hashtag (Cache-of-Thought, 4.3.2).

    `vectors` returns the level-2 vectors of stored examples and `embed` that of a query, both in
    the space of the centres: `partial(knowledge.vectors, by="keywords")` with the view's embedder.
    `search` determines the order inside a group and may compare other features, such as images. A
    group with fewer than k examples is completed from the next nearest group.

    Every call reads `changes` first. A due re-fit runs in the background. Calls use the old groups
    until it succeeds; a failure is logged. Raises `SettingError` if the knowledge base was
    re-embedded, because queries and groups would be in different spaces.
    """

    def __init__(
        self,
        changes: ChangeReader,
        vectors: VectorLookup,
        embed: Embedder,
        search: FilteredSearch,
        tree: HashtagTree,
        *,
        margin: float = 0.0,
    ) -> None:
        self._vectors = vectors
        self._embed = embed
        self._search = search
        self.tree = tree
        self._margin = margin
        self._follower = ChangeFollower(changes, self._take)
        self._follow_lock = Lock()
        self._refitting: Thread | None = None
        self._changed = 0
        self._failed_at: int | None = None

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await asyncio.to_thread(self._find, query, k)
        if self._refit_is_due() and not (self._refitting and self._refitting.is_alive()):
            # A thread and no task, because it may outlive the event loop.
            self._refitting = Thread(target=self._refit, name="hashtag tree")
            self._refitting.start()
        return found

    async def settled(self) -> None:
        """Wait for the running re-fit, if any."""
        if self._refitting is not None:
            await asyncio.to_thread(self._refitting.join)

    def build(self) -> None:
        """Read all changes and fit the tree now, blocking, for a complete knowledge base."""
        self._catch_up()
        self.tree.refit()

    def _refit_is_due(self) -> bool:
        waits = self._failed_at is not None and self._changed < self._failed_at + AGAIN_AFTER
        return not waits and self.tree.due()

    def _refit(self) -> None:
        try:
            # If an example is deleted meanwhile, the re-fit is still due at the next call.
            with suppress(NotFoundError):
                self.tree.refit()
            self._failed_at = None
        except Exception as error:  # the group counter is the caller's code
            if self._failed_at is None:
                log.warning("the re-fit of the hashtag tree failed, the old groups stay: %r", error)
            self._failed_at = self._changed

    def _find(self, query: Query, k: int) -> list[Candidate]:
        self._catch_up()
        vector = self._embed.embed([query])[0]
        self._check(len(vector))
        found = self._filled(vector, query, k, min_ids=k)
        if len(found) < k:  # the query itself was among them, or another process deleted some
            found = self._filled(vector, query, k, min_ids=len(self.tree))
        return sorted(found, key=lambda candidate: -candidate.score)

    def _filled(self, vector: Vectors, query: Query, k: int, min_ids: int) -> list[Candidate]:
        found: list[Candidate] = []
        for ids in self.tree.near(vector, min_ids, margin=self._margin):
            if len(found) >= k:
                break
            found += self._search(query, k - len(found), within=ids)
        return found

    def _catch_up(self) -> None:
        with self._follow_lock:
            self._changed += self._follower.follow()
            if not len(self.tree):
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )

    def _take(self, gone: Sequence[str], new: Sequence[str]) -> None:
        entry = self.tree.oldest_entry(set(gone))
        # Also read the vector of an entry in the tree: a difference reveals that the knowledge base
        # was re-embedded, which no change log records.
        ids = [*new] if entry is None or not new else [*new, entry[0]]
        vectors = self._vectors(ids) if ids else np.empty((0, self._embed.dimension), np.float32)
        self._check(vectors.shape[1])
        if entry is not None and len(ids) > len(new) and not _same(vectors[-1], entry[1]):
            raise _space_error()
        self.tree.remove(gone)
        self.tree.add(new, vectors[: len(new)])

    def _check(self, dimension: int) -> None:
        entry = self.tree.oldest_entry(())
        if dimension != self._embed.dimension or (entry and len(entry[1]) != dimension):
            raise _space_error()


def _same(one: Vectors, other: Vectors) -> bool:
    return bool(np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other))


def _space_error() -> SettingError:
    return SettingError(
        "the stored vectors are in another space than the hashtag tree",
        hint="create a new HashtagRetriever and HashtagTree with the view's current embedder",
    )
