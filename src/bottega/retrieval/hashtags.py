"""Search inside the group that a query belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread

from bottega.errors import EmptyKnowledgeBaseError, NotFoundError
from bottega.protocols import Embedder, Vectors
from bottega.retrieval.following import Follower
from bottega.retrieval.ports import Changes, SearchWithin, VectorsOf
from bottega.retrieval.tree import HashtagTree
from bottega.types import Candidate, Query


class Hashtags:
    """The k nearest examples of the query's level-1 hashtag (Cache-of-Thought, 4.3.2).

    `vectors` gives the level-2 vectors of stored examples and `embed` that of a query, in the same
    space as the centres: `partial(knowledge.vectors, by="keywords")` with the view's embedder.
    Inside a group the order is `search`'s, which may compare something else, such as the images.
    A group with fewer than k examples is filled up from the next nearest.

    Every call follows `changes` first. A re-fit that is due runs in the background; calls go on
    with the old groups until it is done.
    """

    def __init__(
        self,
        changes: Changes,
        vectors: VectorsOf,
        embed: Embedder,
        search: SearchWithin,
        tree: HashtagTree,
        *,
        margin: float = 0.0,
    ) -> None:
        self._vectors = vectors
        self._embed = embed
        self._search = search
        self.tree = tree
        self._margin = margin
        self._follower = Follower(changes, self._read)
        self._following = Lock()
        self._refitting: Thread | None = None

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await asyncio.to_thread(self._find, query, k)
        if self.tree.due() and not (self._refitting and self._refitting.is_alive()):
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

    def _refit(self) -> None:
        # What is deleted while the groups are counted: the re-fit is still due at the next call.
        with suppress(NotFoundError):
            self.tree.refit()

    def _find(self, query: Query, k: int) -> list[Candidate]:
        self._caught_up()
        vector = self._embed.embed([query])[0]
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
            news = self._follower.news()
            if news is not None:
                self.tree.remove(news.gone)
                if news.about is not None:
                    self.tree.add(news.new, news.about)
            if not len(self.tree):
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )

    def _read(self, ids: Sequence[str]) -> Vectors | None:
        return self._vectors(ids) if ids else None
