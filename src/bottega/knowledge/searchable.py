"""The part of a knowledge base that finds examples."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bottega.errors import SettingError
from bottega.exclusion import Exclude
from bottega.knowledge.filters import Filter
from bottega.knowledge.index import Metric
from bottega.knowledge.listing import Listing
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.searching import Searcher
from bottega.knowledge.views import Views, embedded
from bottega.protocols import Vectors
from bottega.types import Candidate, Query


class Searchable(Listing):
    def __init__(
        self, rows: SqliteRows, path: str, metric: Metric, views: Views, hnsw_above: int
    ) -> None:
        super().__init__(rows, path, metric)
        self._views = views
        self._searcher = Searcher(rows, views, metric, hnsw_above)

    def search(
        self,
        query: Query,
        k: int,
        *,
        by: str | None = None,
        where: Filter | None = None,
        within: Collection[str] | None = None,
        include_self: bool = False,
        exclude: Exclude = "same-image",
    ) -> list[Candidate]:
        """The `k` nearest examples, best first; fewer only if there are fewer.

        Excludes the query's own id and, as `exclude` says, every example that shares an image with
        it or only the same question (images, text, choices, context). `include_self` excludes
        nothing. `by` names the view, `where` and `within` (ids) restrict the search. Raises
        `EmptyKnowledgeBaseError` for an empty knowledge base.
        """
        found = self.search_many(
            [query],
            k,
            by=by,
            where=where,
            within=within,
            include_self=include_self,
            exclude=exclude,
        )
        return found[0]

    def search_many(
        self,
        queries: Sequence[Query],
        k: int,
        *,
        by: str | None = None,
        where: Filter | None = None,
        within: Collection[str] | None = None,
        include_self: bool = False,
        exclude: Exclude = "same-image",
    ) -> list[list[Candidate]]:
        """As `search`, with all queries embedded and compared at once."""
        _check_k(k)
        self._check_embeds()
        self._searcher.follow(by)  # before the embedder works for nothing
        if not queries:
            return []
        vectors = embedded(self._searcher.view(by)[1].embed, queries, "queries")
        own = None if include_self else queries
        return self.nearest(
            vectors, k, by=by, where=where, within=within, excluded_for=own, exclude=exclude
        )

    def nearest(
        self,
        vectors: Vectors,
        k: int,
        *,
        by: str | None = None,
        where: Filter | None = None,
        within: Collection[str] | None = None,
        excluded_for: Sequence[Query] | None = None,
        exclude: Exclude = "same-image",
    ) -> list[list[Candidate]]:
        """As `search_many`, with the caller's own vectors (n, dimension).

        `excluded_for` are the queries that the vectors embed; `exclude` applies to each.
        """
        _check_k(k)
        self._check_embeds()
        return self._searcher.nearest(
            vectors,
            k,
            by=by,
            where=where,
            within=within,
            excluded_for=excluded_for,
            exclude=exclude,
        )

    def vectors(self, ids: Sequence[str], by: str | None = None) -> Vectors:
        """As they are stored: (n, dimension) float32, in the order of the ids."""
        self._check_embeds()
        return self._searcher.vectors(ids, by)

    def settle(self) -> None:
        """Waits for indexes that are being built in the background."""
        self._searcher.settle()

    def _check_embeds(self) -> None:
        if not self._views:
            raise SettingError(
                f"{self._path} was opened without an embedder",
                hint="KnowledgeBase.open(path, embed=...) to search or to add",
            )


def _check_k(k: int) -> None:
    if k < 1:
        raise SettingError(f"cannot search for {k} examples", hint="use k >= 1")
