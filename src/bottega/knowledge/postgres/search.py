"""Search of a knowledge base in PostgreSQL: exact, or with an HNSW index for many rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bottega._util.postgres import PostgresPool
from bottega.errors import BottegaError, SettingError, StoreError
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.postgres.filters import Parameters, to_condition
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.records import SearchHit, StoredView, View, Views
from bottega.knowledge.search import ATTEMPTS, MAX_DELETED, ExampleCache, empty_error, stacked
from bottega.knowledge.stores import SearchScope
from bottega.protocols import Vectors
from bottega.types import Candidate, Query

if TYPE_CHECKING:
    from bottega.knowledge.postgres.rows import PostgresRows

log = logging.getLogger(__name__)
T = TypeVar("T")

HNSW_ABOVE = 2_500  # where comparing all rows takes as long as searching the index
OPERATORS: dict[VectorMetric, tuple[str, str]] = {
    "cosine": ("<=>", "halfvec_cosine_ops"),
    "l2": ("<->", "halfvec_l2_ops"),
}
# The index uses half precision, so this many times `k` candidates are compared in full precision.
CANDIDATE_FACTOR = 2
# An index scan with a filter reads many rows that do not match and then misses neighbours: with one
# matching row in 20 of 100,000, recall is 0.92. So under a filter, more rows are compared exactly.
FILTER_FACTOR = 4
CHECK_SECONDS = 30.0
BUILD_LOCK = 0x42747463


class PostgresSearch:
    """Search of one `KnowledgeBase`, with the views that it has read."""

    def __init__(
        self, rows: PostgresRows, views: Views, metric: VectorMetric, hnsw_above: int
    ) -> None:
        self._rows = rows
        self._views = views
        self.metric: VectorMetric = metric
        self._operator, self._operators = OPERATORS[metric]
        self._hnsw_above = hnsw_above
        self._compared_above = FILTER_FACTOR * hnsw_above  # maximum matches of a filter
        self._recent = ExampleCache()
        self._stored: dict[str, StoredView] = {}
        self._filled = False
        self._indexed: dict[int, tuple[float, bool]] = {}  # view: when it was read, has an index
        self._builder: Thread | None = None
        self._lock = Lock()

    def view(self, by: str | None) -> tuple[StoredView, View]:
        """Return the stored view of that name, by default the first one, and its embedder. Raises
        `SettingError` for an unknown name."""
        stored, given = self._with_current_views(lambda: self._views.choose(self._stored, by))
        if stored is None:
            raise empty_error(self._rows)
        return stored, given

    def views(self) -> dict[str, View]:
        if self._views.has_optional:  # a writer must embed those that exist now
            self._stored = self._rows.views()
        return self._with_current_views(lambda: self._views.resolve(self._stored))

    def check_filled(self, by: str | None) -> None:
        self.view(by)
        if not self._filled and not self._rows.count():
            raise empty_error(self._rows)
        self._filled = True

    def nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]:
        """Return the candidates of each vector, repeating the search if a hit was deleted or the
        view was replaced."""
        for _ in range(ATTEMPTS):
            candidates = self._with_current_views(
                lambda: self._nearest(vectors, k, scope, excluded_for)
            )
            if candidates is not None:
                return candidates
        raise StoreError(
            f"examples of {self._rows.name} are deleted faster than a search can read them",
            hint="repeat the search",
        )

    def vectors(self, ids: Sequence[str], by: str | None) -> Vectors:
        return self._with_current_views(lambda: self._vectors(ids, by))

    def _vectors(self, ids: Sequence[str], by: str | None) -> Vectors:
        view, _ = self.view(by)
        keys = self._rows.keys(ids)
        found = self._rows.vectors(keys.values(), view.number)
        return stacked([(id, found.get(keys.get(id, 0))) for id in ids], view)

    def neighbours(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        keys = self._rows.keys(ids)
        same_image = self._rows.same_image_keys(list(keys.values()))
        own = [same_image.get(keys.get(id, 0), set()) for id in ids]
        scope = SearchScope(by, None, None, "same-image")

        def search() -> list[list[SearchHit]]:
            pairs = zip(self._vectors(ids, by), own, strict=True)
            return [self._hits(vector, k, scope, None, excluded) for vector, excluded in pairs]

        return self._with_current_views(search)

    def close_indexes(self) -> None:
        """Clear the cached views and examples. The index itself is in the database."""
        self._stored, self._filled, self._indexed = {}, False, {}
        self._recent.clear()

    def wait_for_indexes(self) -> None:
        if self._builder is not None:
            self._builder.join()
            self._indexed = {}

    def _nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]] | None:
        queries: Sequence[Query | None] = excluded_for or [None] * len(vectors)
        pairs = zip(vectors, queries, strict=True)
        found = [self._hits(vector, k, scope, query) for vector, query in pairs]
        if len(vectors) and not any(found):
            self._filled = False
            self.check_filled(scope.by)
        return self._candidates(found)

    def _with_current_views(self, work: Callable[[], T]) -> T:
        """Run work with the cached views. If it fails, another process may have replaced a view and
        dropped its table: read the views again and retry."""
        if not self._stored:
            self._stored = self._rows.views()
        for _ in range(ATTEMPTS - 1):
            try:
                return work()
            except (StoreError, SettingError):
                if self._stored == (stored := self._rows.views()):
                    raise
                self._stored = stored
        return work()

    def _hits(
        self,
        vector: Vectors,
        k: int,
        scope: SearchScope,
        query: Query | None,
        excluded: Collection[int] = (),
    ) -> list[SearchHit]:
        view, _ = self.view(scope.by)
        parameters = Parameters()
        parameters.add(np.asarray(vector, np.float32), "vector")
        with_clause, source = self._source(view, scope, query, excluded, parameters)
        if self._uses_index(view) and not self._is_selective(scope):
            hits = self._indexed_hits(view, vector, k, with_clause, source, parameters)
            if hits is not None:
                return hits
        return self._ranked(with_clause, source, k, parameters)

    def _indexed_hits(
        self,
        view: StoredView,
        vector: Vectors,
        k: int,
        with_clause: str,
        source: str,
        parameters: Parameters,
    ) -> list[SearchHit] | None:
        """Return the hits of the index, or None if all rows must be compared."""
        stored_vector = self._half_precision("vectors.vector", view)
        query_vector = self._half_precision("$1::vector", view)
        nearest = (
            f"(SELECT vectors.key, vectors.vector FROM {source}"
            f" ORDER BY {stored_vector} {self._operator} {query_vector}"
            f" LIMIT {CANDIDATE_FACTOR * k}) AS vectors"
        )
        hits = self._ranked(with_clause, nearest, CANDIDATE_FACTOR * k, parameters)
        # An index scan ends after `hnsw.max_scan_tuples` rows, even if further rows match.
        return hits[:k] if len(hits) == CANDIDATE_FACTOR * k else None

    def _half_precision(self, vector: str, view: StoredView) -> str:
        """Return the SQL expression of a vector in half precision. For cosines the vector is
        normalized first, because the largest value of half precision is 65,504."""
        if self.metric == "cosine":
            vector = f"l2_normalize({vector})"
        return f"({vector})::halfvec({view.dimension})"

    def _source(
        self,
        view: StoredView,
        scope: SearchScope,
        query: Query | None,
        excluded: Collection[int],
        parameters: Parameters,
    ) -> tuple[str, str]:
        """Return the WITH clause of a statement, and its FROM and WHERE clauses, which select the
        rows that a search may return."""
        clauses = [f"vectors.namespace = {parameters.add(self._rows.namespace, 'text')}"]
        with_clause = join = ""
        if scope.where is not None or scope.within is not None:
            join = " JOIN kb_examples AS examples USING (key)"
        if scope.where is not None:
            clauses.append(to_condition(scope.where, parameters))
        if scope.within is not None:
            ids = parameters.add(list(scope.within), "text[]")
            clauses.append(f"examples.id = ANY({ids})")
        if query is not None:
            keys = self._rows.excluded(query, scope.exclude, parameters)
            with_clause = f"WITH excluded_rows AS MATERIALIZED ({keys}) "
            clauses.append("vectors.key NOT IN (SELECT key FROM excluded_rows)")
        if excluded:
            clauses.append(f"vectors.key <> ALL({parameters.add(list(excluded), 'bigint[]')})")
        return (
            with_clause,
            f"{vectors_table(view.number)} AS vectors{join} WHERE {' AND '.join(clauses)}",
        )

    def _ranked(
        self, with_clause: str, source: str, limit: int, parameters: Parameters
    ) -> list[SearchHit]:
        """Return the rows of the source that are nearest to the first parameter, by their vectors
        in single precision."""
        distance = f"vectors.vector {self._operator} $1::vector"
        if self.metric == "cosine":  # a vector of zeros has the distance NaN: its similarity is 0
            distance = f"coalesce(nullif({distance}, 'NaN'), 1)"
        rows = self._rows.read(
            f"{with_clause}SELECT vectors.key, {distance} AS distance FROM {source}"
            f" ORDER BY distance, vectors.key LIMIT {limit}",
            *parameters.values,
        )
        if self.metric == "cosine":
            return [SearchHit(row["key"], 1 - row["distance"]) for row in rows]
        return [SearchHit(row["key"], -row["distance"]) for row in rows]

    def _candidates(self, found: list[list[SearchHit]]) -> list[list[Candidate]] | None:
        """Return the candidates of the hits, or None if another process has deleted one."""
        wanted = {hit.key for hits in found for hit in hits}
        get = self._recent.get
        examples = {key: example for key in wanted if (example := get(key)) is not None}
        if missing := wanted - examples.keys():
            fetched = self._rows.by_keys(missing)
            if len(fetched) < len(missing):
                return None
            self._recent.keep(fetched, limit=len(examples) + len(fetched) + 10 * MAX_DELETED)
            examples |= fetched
        return [[Candidate(examples[hit.key], hit.score) for hit in hits] for hits in found]

    def _is_selective(self, scope: SearchScope) -> bool:
        """Return whether so few rows match the filter that the search compares all of them."""
        if scope.within is not None:
            return True
        if scope.where is None:
            return False
        parameters = Parameters(self._rows.namespace)
        condition = to_condition(scope.where, parameters)
        limit = self._compared_above + 1
        rows = self._rows.read(
            "SELECT count(*) AS n FROM (SELECT 1 FROM kb_examples AS examples"
            f" WHERE namespace = $1 AND {condition} LIMIT {limit}) AS counted",
            *parameters.values,
        )
        return bool(rows[0]["n"] < limit)

    def _uses_index(self, view: StoredView) -> bool:
        """Return whether the view has an HNSW index. Start building it if the view is large."""
        read, indexed = self._indexed.get(view.number, (0.0, False))
        if indexed or (time.monotonic() - read < CHECK_SECONDS and read):
            return indexed
        name = self._index_name(view)
        valid = self._rows.read(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1)", name
        )
        indexed = bool(valid and valid[0]["indisvalid"])
        if not indexed and self._is_large(view):
            self._build(view)
        self._indexed[view.number] = (time.monotonic(), indexed)
        return indexed

    def _is_large(self, view: StoredView) -> bool:
        rows = self._rows.read(
            f"SELECT count(*) AS n FROM (SELECT 1 FROM {vectors_table(view.number)}"
            f" LIMIT {self._hnsw_above + 1}) AS counted"
        )
        return bool(rows[0]["n"] > self._hnsw_above)

    def _index_name(self, view: StoredView) -> str:
        return f"{vectors_table(view.number)}_hnsw_{self.metric}"

    def _build(self, view: StoredView) -> None:
        with self._lock:
            if self._builder is None or not self._builder.is_alive():
                self._builder = Thread(target=self._build_index, args=(view,), daemon=True)
                self._builder.start()

    def _build_index(self, view: StoredView) -> None:
        """Build the index while searches and writes continue, unless another process builds it."""
        name, table = self._index_name(view), vectors_table(view.number)
        indexed = self._half_precision("vector", view)

        async def work(pool: PostgresPool) -> None:
            async with pool.connection(limited=False) as connection:
                await connection.execute(f"DROP INDEX IF EXISTS {name}")  # of a failed build
                await connection.execute(
                    f"CREATE INDEX CONCURRENTLY {name} ON {table}"
                    f" USING hnsw (({indexed}) {self._operators})"
                )
                # Without statistics, the planner assumes few rows per namespace and reads all.
                await connection.execute(f"ANALYZE {table}")

        try:
            with self._rows.lock(BUILD_LOCK) as is_held:
                if is_held:
                    self._rows.run(work)
        except BottegaError as error:
            log.warning("the search index of %s was not built: %s", self._rows.name, error)
