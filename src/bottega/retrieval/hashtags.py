"""Search inside the group that a query belongs to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread

import numpy as np

from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError
from bottega.protocols import Embedder, Vectors
from bottega.retrieval.bm25 import ChangeFollower
from bottega.retrieval.hashtag_tree import HashtagTree
from bottega.retrieval.ports import ChangeReader, FilteredSearch, VectorLookup
from bottega.types import Candidate, Query

log = logging.getLogger(__name__)

# A vector that is made again may differ in its last digits; of another space, it is far off.
TOLERANCE = 0.1
# Changes before a re-fit that failed is tried again.
AGAIN_AFTER = 64


class HashtagRetriever:
    """The k nearest examples of the query's level-1 hashtag (Cache-of-Thought, 4.3.2).

    `vectors` gives the level-2 vectors of stored examples and `embed` that of a query, in the same
    space as the centres: `partial(knowledge.vectors, by="keywords")` with the view's embedder.
    Inside a group the order is `search`'s, which may compare something else, such as the images.
    A group with fewer than k examples is filled up from the next nearest.

    Every call follows `changes` first. A re-fit that is due runs in the background; calls go on
    with the old groups until it is done, or if it fails, which is logged. Raises `SettingError`
    once the knowledge base was embedded anew: queries and groups would not be of one space.
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
        self._following = Lock()
        self._refitting: Thread | None = None
        self._changed = 0
        self._failed_at: int | None = None

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await asyncio.to_thread(self._find, query, k)
        if self._refit_is_due() and not (self._refitting and self._refitting.is_alive()):
            # A thread, not a task: it may outlive the event loop that began it.
            self._refitting = Thread(target=self._refit, name="hashtag tree")
            self._refitting.start()
        return found

    async def settled(self) -> None:
        """Waits for the re-fit that is running, if one is."""
        if self._refitting is not None:
            await asyncio.to_thread(self._refitting.join)

    def build(self) -> None:
        """Catches up and fits now, blocking: for a knowledge base that stays as it is."""
        self._caught_up()
        self.tree.refit()

    def _refit_is_due(self) -> bool:
        waits = self._failed_at is not None and self._changed < self._failed_at + AGAIN_AFTER
        return not waits and self.tree.due()

    def _refit(self) -> None:
        try:
            # What is deleted while the groups are counted: still due at the next call.
            with suppress(NotFoundError):
                self.tree.refit()
            self._failed_at = None
        except Exception as error:  # counting groups is the caller's code
            if self._failed_at is None:
                log.warning("the hashtags keep their old groups: %r", error)
            self._failed_at = self._changed

    def _find(self, query: Query, k: int) -> list[Candidate]:
        self._caught_up()
        vector = self._embed.embed([query])[0]
        self._check(len(vector))
        found = self._filled(vector, query, k, least=k)
        if len(found) < k:  # the query itself was among them, or another process deleted some
            found = self._filled(vector, query, k, least=len(self.tree))
        return sorted(found, key=lambda candidate: -candidate.score)

    def _filled(self, vector: Vectors, query: Query, k: int, least: int) -> list[Candidate]:
        found: list[Candidate] = []
        for ids in self.tree.near(vector, least, margin=self._margin):
            if len(found) >= k:
                break
            found += self._search(query, k - len(found), within=ids)
        return found

    def _caught_up(self) -> None:
        with self._following:
            self._changed += self._follower.follow()
            if not len(self.tree):
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )

    def _take(self, gone: Sequence[str], new: Sequence[str]) -> None:
        known = self.tree.held(set(gone))
        # Read together with one that the tree knows: by it one sees that the knowledge base was
        # embedded anew, which no change log tells.
        ids = [*new] if known is None or not new else [*new, known[0]]
        vectors = self._vectors(ids) if ids else np.empty((0, self._embed.dimension), np.float32)
        self._check(vectors.shape[1])
        if known is not None and len(ids) > len(new) and not _same(vectors[-1], known[1]):
            raise _moved()
        self.tree.remove(gone)
        self.tree.add(new, vectors[: len(new)])

    def _check(self, dimension: int) -> None:
        known = self.tree.held(())
        if dimension != self._embed.dimension or (known and len(known[1]) != dimension):
            raise _moved()


def _same(one: Vectors, other: Vectors) -> bool:
    return bool(np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other))


def _moved() -> SettingError:
    return SettingError(
        "the stored vectors are not of the space that these hashtags were made in",
        hint="make new Hashtags, with a new HashtagTree and the embedder the view has now",
    )
