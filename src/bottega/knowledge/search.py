"""Search of a knowledge base: embedding, filters, exclusion and indexes."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from bottega._util.caching import LRUCache
from bottega._util.identity import Exclude
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError, StoreError
from bottega.image import KEEP_DECODED_UP_TO
from bottega.knowledge.filters import Filter
from bottega.knowledge.index.index_follower import IndexFollower, StaleIndexError
from bottega.knowledge.index.vector_index import FaissIndex, Keys, VectorMetric
from bottega.knowledge.reader import KnowledgeBaseReader
from bottega.knowledge.records import SearchHit, StoredView, View, Views, embed_checked
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.stores import RowStore, SearchScope, VectorSearch
from bottega.protocols import Embedder, Vectors
from bottega.types import Candidate, Example, Query

MAX_FILTERS = 64
MAX_DELETED = 1000
ATTEMPTS = 3


MAX_CACHE_BYTES = 64 << 20
BYTES_BESIDE_IMAGES = 2048
# An image may cache its pixels and its base64 text beside its bytes.
BYTES_PER_PIXEL = 3
COPIES_OF_BYTES = 3


class ExampleCache:
    """Bounded cache of examples by key. A key always denotes the same content, so no entry can be
    stale."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._examples: dict[int, Example] = {}
        self._lock = Lock()

    def among(self, keys: Collection[int]) -> dict[int, Example]:
        # Without the lock or a recency update: every search runs this.
        get = self._examples.get
        return {key: example for key in keys if (example := get(key)) is not None}

    def __len__(self) -> int:
        return len(self._examples)

    def keep(self, examples: Mapping[int, Example], limit: int) -> None:
        """Add examples; beyond `limit` entries, clear the cache first, because most entries were
        deleted."""
        with self._lock:
            if len(self._examples) + len(examples) > limit:
                self._examples.clear()
                self._bytes = 0
            for key, example in examples.items():
                if key not in self._examples:
                    self._examples[key] = example
                    self._bytes += _size(example)
            while self._bytes > self._max_bytes:
                oldest = next(iter(self._examples))
                self._bytes -= _size(self._examples.pop(oldest))

    def clear(self) -> None:
        with self._lock:
            self._examples.clear()
            self._bytes = 0


def _size(example: Example) -> int:
    size = BYTES_BESIDE_IMAGES + len(example.answer) + len(example.rationale or "")
    for image in example.query.images:
        pixels = image.width * image.height
        size += COPIES_OF_BYTES * len(image.data)
        size += BYTES_PER_PIXEL * pixels if pixels <= KEEP_DECODED_UP_TO else 0
    return size


@dataclass
class ResolvedFilter:
    """Keys that match a filter among the rows up to change `seq` and key `last`."""

    seq: int = -1
    last: int = 0
    keys: Keys = field(default_factory=lambda: np.empty(0, np.int64))


class FileSearch:
    """Indexes of a file and cached filters of one handle."""

    def __init__(
        self, rows: SqliteRows, views: Views, metric: VectorMetric, hnsw_above: int
    ) -> None:
        self._rows = rows
        self._views = views
        self._metric: VectorMetric = metric
        self._hnsw_above = hnsw_above
        self._followers: dict[str, IndexFollower] = {}
        self._filters: LRUCache[Filter, ResolvedFilter] = LRUCache(MAX_FILTERS)
        self._default: str | None = None  # name of the first view
        self._recent = ExampleCache()
        self._lock = Lock()

    def view(self, by: str | None) -> tuple[StoredView, View]:
        """Return the stored view of that name, by default the first one, and its embedder. Raises
        `SettingError` for an unknown name."""
        stored = self._rows.views()
        return chosen_view(self._views, stored, by, self._rows)

    def views(self) -> dict[str, View]:
        return self._views.resolve(self._rows.views())

    def current_index(self, by: str | None) -> FaissIndex:
        """Return the index with every change that any process has committed. Raises
        `EmptyKnowledgeBaseError`."""
        while True:
            follower = self._follower(by)
            try:
                index = follower.current()
                break
            except StaleIndexError:  # this or another handle replaced the view
                self._drop(follower)
        if not len(index):
            raise empty_error(self._rows)
        return index

    def check_filled(self, by: str | None) -> None:
        self.current_index(by)

    def nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]:
        """Return the candidates of each vector, repeating the search if a hit was deleted."""
        by = scope.by
        rebuilt = False
        while True:
            index = self.current_index(by)
            own = None
            if excluded_for is not None:
                own = [self._rows.excluded_keys(query, scope.exclude) for query in excluded_for]
            allowed = self._allowed_keys(scope.where, scope.within, limit=len(index))
            searched = index.watermark
            hits = index.search(vectors, k, allowed=allowed, excluded=own)
            candidates = self._candidates(hits, len(index))
            if candidates is not None:
                return candidates
            if searched == self._rows.last_seq():  # not explained by a delete of another process
                if rebuilt:
                    raise StoreError(
                        f"the change log of {self._rows.name} lacks the removal of examples",
                        hint="run bottega verify --repair, or verify(repair=True)",
                    )
                self._drop(self._follower(by))
                rebuilt = True

    def vectors(self, ids: Sequence[str], by: str | None) -> Vectors:
        view, _ = self.view(by)
        with self._rows.snapshot():
            keys = self._rows.keys(ids)
            found = self._rows.vectors(keys.values(), view.number)
        return stacked([(id, found.get(keys.get(id, 0))) for id in ids], view)

    def neighbours(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        vectors = self.vectors(ids, by)
        keys = self._rows.keys(ids)
        same_image = self._rows.same_image_keys(list(keys.values()))
        own = [same_image.get(keys.get(id, 0), set()) for id in ids]
        return self.current_index(by).search(vectors, k, excluded=own)

    def close_indexes(self) -> None:
        """Close every index; the next search opens them again."""
        with self._lock:  # held until the end: no search may open an index meanwhile
            for follower in self._followers.values():
                follower.close()
            self._followers.clear()
            self._recent.clear()

    def wait_for_indexes(self) -> None:
        """Wait until no index is being built."""
        with self._lock:
            followers = list(self._followers.values())
        for follower in followers:
            follower.wait_for_indexes()

    def _follower(self, by: str | None) -> IndexFollower:
        with self._lock:
            name = self._default if by is None else by
            follower = None if name is None else self._followers.get(name)
            if follower is None:
                view, _ = self.view(by)
                if by is None:
                    self._default = view.name
                follower = self._followers.get(view.name) or IndexFollower(
                    self._rows, view, self._metric, self._hnsw_above
                )
                self._followers[view.name] = follower
            return follower

    def _drop(self, follower: IndexFollower) -> None:
        """Close and forget a stale follower without saving it."""
        with self._lock:
            kept = {name: each for name, each in self._followers.items() if each is not follower}
            self._followers = kept
        # Without the lock: closing waits for the background worker.
        follower.close(keep=False)

    def _allowed_keys(
        self, where: Filter | None, within: Collection[str] | None, limit: int
    ) -> Keys | None:
        keys = None if where is None else self._filter_keys(where, limit)
        if within is not None:
            chosen = np.fromiter(self._rows.keys(within).values(), np.int64)
            keys = chosen if keys is None else np.intersect1d(chosen, keys)
        return keys

    def _filter_keys(self, where: Filter, limit: int) -> Keys:
        """Return the keys that match. Rows never change, so only new rows are tested; the index
        ignores deleted ones."""
        with self._lock:
            cached = self._filters.get(where)
            if cached is None:
                self._filters.put(where, cached := ResolvedFilter())
            seq = self._rows.last_seq()
            if cached.seq != seq:
                if len(cached.keys) > MAX_DELETED + 2 * limit:  # most of them have been deleted
                    cached.last, cached.keys = 0, np.empty(0, np.int64)
                # Read before the rows: a row added in between is tested again, not missed.
                last = self._rows.last_key()
                new = self._rows.keys_where(where, cached.last)
                cached.keys = np.union1d(cached.keys, np.array(new, np.int64))
                cached.seq, cached.last = seq, last
            return cached.keys

    def _candidates(self, hits: list[list[SearchHit]], living: int) -> list[list[Candidate]] | None:
        """Return the candidates of the hits, or None if another process has deleted one since the
        search."""
        wanted = {hit.key for found in hits for hit in found}
        examples = self._recent.among(wanted)
        if missing := wanted - examples.keys():
            fetched = self._rows.by_keys(missing)
            # Keys are never reused, so a missing row has been deleted.
            if len(fetched) < len(missing):
                return None
            self._recent.keep(fetched, limit=living + MAX_DELETED)
            examples |= fetched
        return [[Candidate(examples[hit.key], hit.score) for hit in found] for found in hits]


def chosen_view(
    views: Views, stored: Mapping[str, StoredView], by: str | None, rows: RowStore
) -> tuple[StoredView, View]:
    """Return the stored view `by`, by default the first one, and its embedder."""
    given = views.resolve(stored)
    name = next(iter(given)) if by is None else by
    if name not in given:
        raise SettingError(
            f"view {name!r} does not exist", hint=f"search by one of {', '.join(given)}"
        )
    if name not in stored:
        raise empty_error(rows)
    return stored[name], given[name]


def stacked(vectors: Sequence[tuple[str, Vectors | None]], view: StoredView) -> Vectors:
    """Return the vectors of the ids as rows. Raises `NotFoundError` for a missing one."""
    rows = []
    for id, vector in vectors:
        if vector is None:
            raise NotFoundError(
                f"example {id!r} has no vector", hint="run bottega verify to find missing vectors"
            )
        rows.append(vector)
    return np.stack(rows) if rows else np.empty((0, view.dimension), np.float32)


def empty_error(rows: RowStore) -> EmptyKnowledgeBaseError:
    where = f"the namespace {rows.namespace!r} of {rows.name}" if rows.namespace else rows.name
    return EmptyKnowledgeBaseError(f"{where} holds no examples", hint="add some first: bottega add")


class KnowledgeBaseSearch(KnowledgeBaseReader):
    """Operations of a knowledge base that need its embedders."""

    def __init__(
        self, rows: RowStore, path: str, metric: VectorMetric, views: Views, search: VectorSearch
    ) -> None:
        super().__init__(rows, path, metric)
        self._views = views
        self._searcher = search

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
        """Return the `k` nearest examples, best first; fewer only if there are fewer.

        Excludes the query's own id and, by `exclude`, every example that shares an image with it or
        only the same question (images, text, choices, context). `include_self` excludes nothing.
        `by` names the view; `where` and `within` (ids) restrict the search. Raises
        `EmptyKnowledgeBaseError` for an empty knowledge base.
        """
        scope = SearchScope(by, where, within, exclude)
        return self._search([query], k, scope, include_self)[0]

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
        """Search several queries at once, as `search` does one."""
        return self._search(queries, k, SearchScope(by, where, within, exclude), include_self)

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
        """Search by vectors (n, dimension) of the caller, as `search_many` does by queries.

        `excluded_for` are the queries that the vectors embed; `exclude` applies to each.
        """
        _check_k(k)
        self._check_embeds()
        scope = SearchScope(by, where, within, exclude)
        return self._searcher.nearest(vectors, k, scope, excluded_for)

    def vectors(self, ids: Sequence[str], by: str | None = None) -> Vectors:
        """Return the stored vectors (n, dimension), float32, in the order of the ids."""
        self._check_embeds()
        return self._searcher.vectors(ids, by)

    def leave_one_out_scores(
        self, k: int, *, by: str | None = None, sample: int = 500, seed: int = 0
    ) -> Vectors:
        """Return the scores (n, k) of the `k` nearest examples with other images, best first, of
        at most `sample` examples. Examples with fewer than `k` such others are excluded."""
        ids = self.sample_ids(sample, seed=seed)
        rows = [[hit.score for hit in found] for found in self._hits(ids, k, by)]
        return np.array([row for row in rows if len(row) == k], np.float32).reshape(-1, k)

    def sample_ids(self, size: int, *, seed: int = 0) -> list[str]:
        """Return the ids of at most `size` random examples."""
        ids = self._rows.ids_where()
        return random.Random(seed).sample(ids, min(size, len(ids)))

    def neighbours(
        self, ids: Sequence[str], k: int, *, by: str | None = None
    ) -> list[list[tuple[str, float]]]:
        """Return the ids and scores of the `k` nearest examples of each example that share no
        image with it, best first. Reads no images, so it suits many ids."""
        for _ in range(ATTEMPTS):
            found = self._hits(ids, k, by)
            keys = sorted({hit.key for hits in found for hit in hits})
            names = dict(zip(keys, self._rows.ids_of(keys), strict=False))
            if len(names) == len(keys):  # else another process has deleted some since
                return [[(names[hit.key], hit.score) for hit in hits] for hits in found]
        raise StoreError(
            f"examples of {self._rows.name} are deleted faster than a search can read them",
            hint="repeat the search",
        )

    def _hits(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        _check_k(k)
        self._check_embeds()
        return self._searcher.neighbours(ids, k, by) if ids else []

    def image_vectors(self, sha256s: Collection[str], by: str | None = None) -> dict[str, Vectors]:
        """Return the stored vectors of examples with exactly one image, by its sha256."""
        self._check_embeds()
        try:
            view, _ = chosen_view(self._views, self._rows.views(), by, self._rows)
        except EmptyKnowledgeBaseError:
            return {}
        return self._rows.vectors_of_images(sha256s, view.number)

    def embedder(self, by: str | None = None) -> Embedder:
        """Return the embedder of a view, by default the first one."""
        self._check_embeds()
        given = self._views.resolve(self._rows.views())
        return given[next(iter(given)) if by is None else by].embed

    def embed(self, queries: Sequence[Query], by: str | None = None) -> Vectors:
        """Return the query vectors (n, dimension), float32, that a search compares with the
        examples."""
        return embed_checked(self.embedder(by), queries, "queries")

    def excluded_ids(self, query: Query, exclude: Exclude = "same-image") -> set[str]:
        """Return the ids of the examples that a search for the query excludes."""
        found = self._rows.by_keys(self._rows.excluded_keys(query, exclude))
        return {str(example.id) for example in found.values()}

    def wait_for_indexes(self) -> None:
        """Wait until no index is being built in the background."""
        self._searcher.wait_for_indexes()

    def _search(
        self, queries: Sequence[Query], k: int, scope: SearchScope, include_self: bool
    ) -> list[list[Candidate]]:
        _check_k(k)
        self._check_embeds()
        self._searcher.check_filled(scope.by)  # raises before the embedder runs
        if not queries:
            return []
        vectors = embed_checked(self._searcher.view(scope.by)[1].embed, queries, "queries")
        return self._searcher.nearest(vectors, k, scope, None if include_self else queries)

    def _check_embeds(self) -> None:
        if not self._views:
            raise SettingError(
                f"{self._path} was opened without an embedder",
                hint="pass embed= to KnowledgeBase.open to search or to add",
            )


def _check_k(k: int) -> None:
    if k < 1:
        raise SettingError(f"k must be at least 1, got {k}", hint="use k=5")
