"""Search under a fitted metric, by an index of transformed vectors in memory, for every kind of
store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from bottega._util.caching import LRUCache
from bottega._util.executor import batched
from bottega.errors import SettingError, StoreError
from bottega.image import Image
from bottega.knowledge.index.vector_index import FlatIndex
from bottega.knowledge.metric import FittedMetric, metric_name
from bottega.knowledge.records import Change, SearchHit, StoredView, View, unit
from bottega.knowledge.search import ATTEMPTS, SPARE, ExampleCache, empty_error
from bottega.knowledge.stores import RowStore, SearchScope, VectorSearch, labels_by_id
from bottega.protocols import Vectors
from bottega.types import IMAGE_QUESTION, Candidate, Example, Query

PAGE = 2048
CLASS_MEAN = "class mean"  # source of the examples that stand for class means
MAX_ROWS = 4096  # cached vectors of queries, and of class means, by the sha256 of the image


@dataclass(frozen=True)
class ClassSums:
    """Sums (classes, d) of the unit vectors of each class. A class is a combination of labels, its
    number the position in `labels`; `class_of` maps keys of rows to numbers."""

    labels: Sequence[tuple[str, ...]]
    sums: Vectors
    class_of: Mapping[int, int]

    @classmethod
    def of(cls, rows: RowStore, view: int) -> Self:
        """Read the vectors of all labelled rows, a page at a time."""
        labels = labels_by_id(rows)
        number = {one: index for index, one in enumerate(dict.fromkeys(labels.values()))}
        class_of: dict[int, int] = {}
        sums = np.zeros((len(number), 0), np.float32)
        for page in batched(labels, PAGE):
            found = rows.vectors((keys := rows.keys(page)).values(), view)
            classes = {key: number[labels[id]] for id, key in keys.items() if key in found}
            if not classes:
                continue
            vectors = unit(np.stack([found[key] for key in classes]))
            if not class_of:
                sums = np.zeros((len(number), vectors.shape[1]), np.float32)
            np.add.at(sums, list(classes.values()), vectors)
            class_of |= classes
        return cls(list(number), sums, class_of)

    def means(self, without: Mapping[int, Vectors]) -> tuple[Vectors, NDArray[np.bool_]]:
        """Return the means (classes, d) without these rows, given as vectors by key, and which
        classes (classes,) have other rows."""
        sums = self.sums.copy()
        counts = np.bincount(list(self.class_of.values()), minlength=len(sums))
        for key, vector in without.items():
            if key in self.class_of:
                sums[self.class_of[key]] -= unit(vector[None])[0]
                counts[self.class_of[key]] -= 1
        divisors = np.maximum(counts, 1).astype(np.float32)
        return np.divide(sums, divisors[:, None], dtype=np.float32), counts > 0


class FittedSearch:
    """Search that compares the rows of one view under a fitted metric, and leaves other views, and
    requests for the plain metric, to the search of the store.

    The index transforms the stored vectors with the one metric that it was built with, so no
    search ever compares vectors of two metrics. It follows the changes of all
    processes.
    """

    def __init__(
        self,
        rows: RowStore,
        plain: VectorSearch,
        metric: FittedMetric,
        view: int,
        exponent: float = 1.0,
    ) -> None:
        self._rows, self._plain = rows, plain
        self.exponent = exponent  # of the shares of a vote, to make them probabilities
        self.fitted, self._view = metric, view
        self._index: FlatIndex | None = None
        self._keys: dict[str, int] = {}  # of indexed rows by id
        self._seq = 0  # the last change that the index contains
        self._recent = ExampleCache()
        self._mean_rows: LRUCache[str, Vectors] = LRUCache(MAX_ROWS)
        self._query_rows: LRUCache[str, Vectors] = LRUCache(MAX_ROWS)
        self._sums: tuple[int, ClassSums] | None = None  # with the last change they contain
        self._lock = Lock()

    @property
    def metric(self) -> str:
        return metric_name(self.fitted.shrinkage)

    def view(self, by: str | None) -> tuple[StoredView, View]:
        return self._plain.view(by)

    def views(self) -> dict[str, View]:
        return self._plain.views()

    def check_filled(self, by: str | None) -> None:
        self._plain.check_filled(by)

    def vectors(self, ids: Sequence[str], by: str | None) -> Vectors:
        return self._plain.vectors(ids, by)

    def neighbours(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        return self._plain.neighbours(ids, k, by)

    def wait_for_indexes(self) -> None:
        self._plain.wait_for_indexes()

    def close_indexes(self) -> None:
        with self._lock:
            self._index = None
            self._recent.clear()
        self._plain.close_indexes()

    def nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]:
        """Return the candidates of each vector, repeating the search if a hit was deleted."""
        if scope.is_plain or self.view(scope.by)[0].number != self._view:
            return self._plain.nearest(vectors, k, scope, excluded_for)
        rows = self._transformed(vectors)
        for _ in range(ATTEMPTS):
            index = self._current()
            own = None
            if excluded_for is not None:
                own = [self._rows.excluded_keys(query, scope.exclude) for query in excluded_for]
            allowed = self._allowed(scope)
            hits = index.search(rows, k, allowed=allowed, excluded=own)
            candidates = self._candidates(hits, len(index))
            if candidates is not None:
                return candidates
        raise StoreError(
            f"examples of {self._rows.name} are deleted faster than a search can read them",
            hint="repeat the search",
        )

    def keep(self, images: Sequence[Image], vectors: Vectors) -> None:
        """Keep the transformed vectors (n, d) of images for `image_rows`."""
        for image, row in zip(images, self.fitted.transform(vectors), strict=True):
            self._query_rows.put(image.sha256, row)

    def class_means(
        self, vectors: Vectors, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]:
        """Return for each vector (n, d) the class means with their cosines, as candidates, without
        the rows that share an image with the query. The image of a candidate is a placeholder: it
        identifies the vector of the mean for `image_rows`."""
        sums = self._class_sums()
        transformed = self._transformed(vectors)
        found = []
        queries: Sequence[Query | None] = excluded_for or [None] * len(transformed)
        for row, query in zip(transformed, queries, strict=True):
            excluded = set() if query is None else self._rows.excluded_keys(query, "same-image")
            keys = excluded & sums.class_of.keys()
            means, present = sums.means(self._rows.vectors(keys, self._view) if keys else {})
            rows = self.fitted.transform_means(means)
            scores = (rows @ row).tolist()
            found.append(
                [
                    Candidate(self._mean_example(sums.labels[index], rows[index]), scores[index])
                    for index in np.flatnonzero(present).tolist()
                ]
            )
        return found

    def _transformed(self, vectors: Vectors) -> Vectors:
        if vectors.shape[1:] != self.fitted.centre.shape:
            raise SettingError(
                f"vectors must have the shape (n, {len(self.fitted.centre)}), got {vectors.shape}",
                hint="use the embedder of this knowledge base",
            )
        return self.fitted.transform(vectors)

    def _mean_example(self, labels: tuple[str, ...], row: Vectors) -> Example:
        digest = sha256(row.tobytes()).digest()
        image = Image.from_pillow(Pillow.frombytes("L", (len(digest), 1), digest))
        self._mean_rows.put(image.sha256, row)
        question = Query(IMAGE_QUESTION, (image,))
        return Example(question, ", ".join(labels), labels, source=CLASS_MEAN)

    def image_rows(self, sha256s: Collection[str]) -> tuple[dict[str, Vectors], dict[str, Vectors]]:
        """Return the transformed vectors of stored images and recent queries, and those of recent
        class means, by the sha256 of their image."""
        means = {name: row for name in sha256s if (row := self._mean_rows.get(name)) is not None}
        images = {name: row for name in sha256s if (row := self._query_rows.get(name)) is not None}
        stored = self._rows.vectors_of_images(set(sha256s) - images.keys(), self._view)
        images |= {name: self.fitted.transform(row[None])[0] for name, row in stored.items()}
        return images, means

    def _class_sums(self) -> ClassSums:
        with self._lock:
            last = self._rows.last_seq()
            if self._sums is None or self._sums[0] != last:
                self._sums = last, ClassSums.of(self._rows, self._view)
            return self._sums[1]

    def _allowed(self, scope: SearchScope) -> Collection[int] | None:
        if scope.where is None and scope.within is None:
            return None
        ids = None if scope.where is None else set(self._rows.ids_where(scope.where))
        if scope.within is not None:
            ids = set(scope.within) if ids is None else ids.intersection(scope.within)
        return self._rows.keys(ids or ()).values()

    def _current(self) -> FlatIndex:
        """Return the index with every change that any process has committed."""
        with self._lock:
            last = self._rows.last_seq()  # before the rows: a later change is applied again
            if self._index is None or not self._catch_up(self._index, last):
                self._keys, self._index = {}, FlatIndex(self.fitted.dimension, "cosine")
                self._put(self._index, self._rows.ids_where())
            self._seq = last
            if not len(self._index):
                raise empty_error(self._rows)
            return self._index

    def _catch_up(self, index: FlatIndex, last: int) -> bool:
        """Apply the missing changes. Return False if the log has lost some of them."""
        while self._seq < last:
            changes = self._rows.example_changes_since(self._seq, PAGE)
            # Read after the changes: another process may have pruned before they were read.
            if self._seq < self._rows.pruned():
                return False
            self._put(index, dict.fromkeys(one.id for one in changes))
            self._seq = changes[-1].seq if changes else last
        return True

    def _put(self, index: FlatIndex, ids: Iterable[str]) -> None:
        """Replace the rows of these ids by those that are stored now."""
        for page in batched(ids, PAGE):
            keys = self._rows.keys(page)
            found = self._rows.vectors(keys.values(), self._view)
            changes = [
                Change(0, old, None)
                for id in page
                if (old := self._keys.pop(id, None)) is not None and old not in found
            ]
            if found:
                rows = self.fitted.transform(np.stack(list(found.values())))
                changes += [Change(0, key, row) for key, row in zip(found, rows, strict=True)]
            index.apply(changes)
            self._keys |= {id: key for id, key in keys.items() if key in found}

    def _candidates(self, hits: list[list[SearchHit]], living: int) -> list[list[Candidate]] | None:
        """Return the candidates of the hits, or None if another process has deleted one."""
        wanted = {hit.key for found in hits for hit in found}
        # `get`: another thread may drop an entry at any moment.
        examples = {key: one for key in wanted if (one := self._recent.get(key)) is not None}
        if missing := wanted - examples.keys():
            fetched = self._rows.by_keys(missing)
            if len(fetched) < len(missing):
                return None
            self._recent.keep(fetched, limit=living + SPARE)
            examples |= fetched
        return [[Candidate(examples[hit.key], hit.score) for hit in found] for found in hits]
