"""Exact dense search."""

from __future__ import annotations

import asyncio

from bottega.protocols import Embedder
from bottega.retrieval.ports import Nearest, Search
from bottega.types import Candidate, Query


class Dense:
    """The k nearest examples by `search(query, k)`, which blocks and therefore runs in a thread.

    Visual RAG, eq. 1: exact L2 distance (or cosine, the same order for unit vectors). By image, by
    text or by both is the search's matter: the knowledge base's embedder, or the view of it that
    `functools.partial(knowledge.search, by="text")` names. Both is the mean of the image's and the
    text's unit vector; `SentenceEmbedder(model, mode="average", average="raw", normalize=False)`
    is the mean as Cache-of-Thought's code takes it.
    """

    def __init__(self, search: Search) -> None:
        self._search = search

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self._search, query, k)


class Crossed:
    """Queries embedded by one embedder, compared with a view that another one made.

    Both must share a space, as CLIP's images and texts do. Cache-of-Thought's best dense search
    (Table 1) compares the mean of a query's image and keywords with the cached images alone.
    """

    def __init__(self, embed: Embedder, nearest: Nearest) -> None:
        self._embed = embed
        self._nearest = nearest

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self._find, query, k)

    def _find(self, query: Query, k: int) -> list[Candidate]:
        return self._nearest(self._embed.embed([query]), k, excluded_for=[query])[0]
