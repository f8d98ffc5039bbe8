"""Knowledge base: examples in a file or a PostgreSQL database, searched by their vectors."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import numpy as np

from bottega._util.executor import batched
from bottega._util.identity import Exclude, identity
from bottega._util.postgres import postgres_url
from bottega._util.progress import Progress, Stages, Step, no_stages, showing_progress, size_of
from bottega.errors import (
    EmbedderMismatchError,
    LogPrunedError,
    OnError,
    SettingError,
    StoreError,
    error_handler,
)
from bottega.image import Image, path_text
from bottega.knowledge.batch import (
    AddResult,
    check_annotation,
    embedded_batches,
    reindex,
    replace_batch,
)
from bottega.knowledge.eviction import Capacity, Eviction, UsageBuffer, capacity_of
from bottega.knowledge.filters import And, Eq, Filter
from bottega.knowledge.fitted_search import FittedSearch
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.label_support import LabelSupport, label_supports
from bottega.knowledge.metric import SHRINKAGE, FittedMetric, SearchMetric, metric_name
from bottega.knowledge.opening import check_settings, named_mismatch, open_rows, stored_views
from bottega.knowledge.records import (
    RowMetadata,
    SearchHit,
    StoredView,
    View,
    Views,
    embed_checked,
    to_json,
    unknown_id_error,
)
from bottega.knowledge.search import ATTEMPTS, empty_error
from bottega.knowledge.stats import Stats, render_stats, stats_of
from bottega.knowledge.stored_metric import (
    StoredMetric,
    fitted_to,
    metric_in_use,
    stored_metric,
    with_stored_metric,
)
from bottega.knowledge.stores import (
    RowStore,
    SearchScope,
    check_finished,
    full_id,
    full_ids,
    labels_by_id,
)
from bottega.knowledge.transfer import count_exported, export, read_export
from bottega.knowledge.verification import VerificationReport, makes_vectors, verify
from bottega.protocols import Embedder, Vectors
from bottega.types import Candidate, Example, ExampleChange, Query

ITERATION_BATCH = 64
PAGE = 4096


def _check_k(k: int) -> None:
    if k < 1:
        raise SettingError(f"k must be at least 1, got {k}", hint="use k=5")


class KnowledgeBase:
    """Examples in a file or a PostgreSQL database, searched by the vectors of their embedders.

    Several threads and processes may use it at once: a search includes every committed addition. A
    handle sees one namespace. Every method blocks; call it off the event loop. Methods
    raise `StoreError`.
    """

    def __init__(
        self,
        rows: RowStore,
        embed: Embedder | Mapping[str, View] | None,
        *,
        path: str,
        metric: SearchMetric = "stored",
        capacity: Capacity | None = None,
        hnsw_above: int | None = None,
    ) -> None:
        self._rows = rows
        self._path = path
        self._views = Views(embed)
        plain: VectorMetric = "l2" if metric == "l2" else "cosine"
        self._plain = self._searcher = rows.open_search(self._views, plain, hnsw_above)
        self._capacity = capacity
        self._uses = UsageBuffer(rows.add_uses)
        self._views.resolve(rows.views())
        self._uses_stored_metric = metric in ("stored", "fitted")
        if self._uses_stored_metric and embed is not None:
            self._searcher = with_stored_metric(rows, self._plain, required=metric == "fitted")

    @classmethod
    def open(
        cls,
        path: str | Path,
        embed: Embedder | Mapping[str, View] | Literal["stored"] | None = "stored",
        *,
        metric: SearchMetric = "stored",
        create: bool = True,
        capacity: int | None = None,
        evict: Eviction | None = None,
        hnsw_above: int | None = None,
        namespace: str = "",
        vectors: str | None = None,
    ) -> Self:
        """Open or create a file, or the tables of a `postgresql://` URL.

        `:memory:` keeps the data in memory.

        `embed` is an embedder, or several named views of which the first is the default. By
        default, the embedders named in an existing file are loaded. With None, examples can be
        listed, shown and deleted but not searched, and an existing empty file is rejected
        (`StoreError`). The first `add` ties the file to its views; opening it with another embedder
        raises `EmbedderMismatchError`. `metric` concerns only the search: "stored" (the fitted one
        if the file has one, else the cosine), "fitted" (`SettingError` without one), "cosine" or
        "l2".

        `capacity` limits the examples of the namespace after every commit: `evict` selects those to
        remove (default: least recently used) and spares pinned ones. Search is exact up to
        `hnsw_above` examples (default: 50,000, in PostgreSQL 2,500). In a read-only folder, writes
        of other processes are visible only if one of them opened the file first. `vectors` is the
        URL of a Milvus database, e.g. `milvus://host:19530/database`, that keeps the search index
        of a large knowledge base in PostgreSQL.
        """
        check_settings(embed, metric, namespace)
        limit = capacity_of(capacity, evict)
        given = stored_views(path, namespace) if embed == "stored" else embed
        rows = open_rows(
            path, create=create, embeds=given is not None, namespace=namespace, vectors=vectors
        )
        try:
            check_finished(rows)
            return cls(
                rows,
                given,
                path=rows.name if postgres_url(path) else path_text(path),
                metric=metric,
                capacity=limit,
                hnsw_above=hnsw_above,
            )
        except BaseException as error:
            rows.close()
            if isinstance(error, EmbedderMismatchError):
                raise named_mismatch(error) from error
            raise

    def close(self) -> None:
        """Write the use counters and save large indexes to files beside the database."""
        with closing(self._rows):
            try:
                self._uses.flush()
            finally:
                self._searcher.close_indexes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(
        self,
        examples: Iterable[Example],
        *,
        batch_size: int = 64,
        on_error: OnError | None = None,
        progress: Progress = False,
    ) -> AddResult:
        """Store the new examples. Each batch is durable before the next begins.

        Examples are duplicates if images, context, question, choices and answer are equal. An
        example that cannot be decoded or embedded goes to `on_error`, which raises by default;
        earlier batches remain. `progress=True` shows a progress bar on standard error, or in the
        notebook; a callback receives the number of examples done since its last call. `new`
        includes examples that a `capacity` has evicted again.
        """
        with showing_progress("Adding", size_of(examples), progress) as step:
            return self._added(examples, batch_size, on_error, step)

    def _added(
        self,
        examples: Iterable[Example],
        batch_size: int,
        on_error: OnError | None,
        step: Step,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
    ) -> AddResult:
        self._check_embeds()
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, got {batch_size}", hint="use 64")
        views = self._searcher.views()
        report, total = error_handler(on_error), AddResult()
        for batch in embedded_batches(batched(examples, batch_size), self._rows, views, report):
            if self._capacity is not None:
                self._uses.flush()  # eviction depends on the counts
            new = 0
            if batch.valid:
                new = self._rows.put(batch.valid, batch.vectors, self._capacity, metadata_by_id)
            total += AddResult(new, batch.size - new - batch.failed, batch.failed)
            step(batch.size)
        return total

    def replace(
        self, examples: Sequence[Example], *, pin: bool = False, on_error: OnError | None = None
    ) -> list[str | None]:
        """Store newer answers in one commit and return their ids in order.

        Each answer replaces those stored for the same question (images, text, choices and the tag
        `context`); of several answers to one question the last counts. A pinned answer stays, and
        its id is returned instead. With `pin`, the commit replaces pinned answers, too, and pins
        the newer ones. The id is None for an example that failed, which goes to `on_error` as in
        `add`.
        """
        self._check_embeds()
        if self._capacity is not None:
            self._uses.flush()
        views = self._searcher.views()
        report = error_handler(on_error)
        return replace_batch(examples, self._rows, views, report, self._capacity, pin)

    def import_from(
        self,
        folder: str | Path,
        *,
        batch_size: int = 64,
        on_error: OnError | None = None,
        progress: Progress = False,
    ) -> AddResult:
        """Add the examples of an export, with age, pins and counters, and embed them again."""
        total = AddResult()
        pending = read_export(Path(folder), error_handler(on_error))
        with showing_progress("Adding", count_exported(Path(folder)), progress) as step:
            while batch := list(islice(pending, batch_size)):
                examples = [example for example, _ in batch]
                # Of equal examples the first is stored.
                metadata = {identity(example): one for example, one in reversed(batch)}
                total += self._added(examples, batch_size, on_error, step, metadata)
        return total

    def annotate(
        self,
        id: str,
        *,
        rationale: str | None,
        labels: Sequence[str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Set the rationale of an example (None removes it) and its labels (None keeps them), and
        add tags. Durable on return.

        Id, source, age, pin, counters and vectors stay. The example moves to the end of the
        insertion order, and `changes` reports it as stored. A view that embeds rationales or tags
        keeps its old vector until `verify(deep=True, repair=True)`. Raises `NotFoundError`.
        """
        fields = {"rationale": rationale}
        if labels is not None:
            check_annotation(None, {}, labels)
            fields["labels"] = to_json(labels)
        self._annotate(id, fields, tags or {})

    def tag(self, id: str, tags: Mapping[str, str]) -> None:
        """Add tags to an example and keep its rationale. See `annotate`."""
        self._annotate(id, {}, tags)

    def _annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> None:
        check_annotation(fields.get("rationale"), tags)
        (complete,) = full_ids(self._rows, [id])
        if not self._rows.annotate(complete, fields, tags):
            raise unknown_id_error(id)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete the examples and return their number. Deletes none if an id is unknown or
        ambiguous."""
        return self._rows.delete(full_ids(self._rows, ids))

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None:
        """Record that these examples were shown and share `saved_usd` US dollars of savings.

        Eviction policies read these counts. They are kept in memory and written in batches. Unknown
        ids are ignored, because an example may have been evicted after it was shown.
        """
        self._uses.record([ids] if isinstance(ids, str) else ids, saved_usd)

    def pin(self, ids: Collection[str]) -> int:
        """Protect these examples from eviction and return the number newly pinned. Pins none if an
        id is unknown."""
        return self._rows.pin(full_ids(self._rows, ids), True)

    def unpin(self, ids: Collection[str]) -> int:
        """Remove the pins and return their number."""
        return self._rows.pin(full_ids(self._rows, ids), False)

    def fit_metric(
        self, shrinkage: float | None = SHRINKAGE, *, without: Collection[str] = ()
    ) -> FittedMetric | None:
        """Fit a metric to the labels and the vectors of the first view, store it and search by it.

        Other open handles keep the metric that they read when they were opened. The plain cosine is
        stored and None returned if `shrinkage` is None, if there are fewer than two labels, if
        fewer than half of the examples share their label with another one, or if no class has two
        different vectors. Fit again when labels change. An evaluation passes the
        ids of its items as `without`.
        """
        chosen = fitted_to(self._rows, self._first_view(), shrinkage, without)
        chosen.store(self._rows)
        if self._views:
            self._searcher = with_stored_metric(self._rows, self._plain, required=False)
        return chosen.metric

    def refit_metric(self) -> bool:
        """Fit the metric if none was chosen for the first view's embedder, or if the set of labels
        has changed since, or the number of examples by a quarter. A chosen plain cosine stays.
        Return whether a metric was fitted."""
        view = self._first_view()
        stored = stored_metric(self._rows)
        if stored is None or stored.embedder != view.fingerprint:
            return self.fit_metric() is not None
        if not stored.is_outdated([*labels_by_id(self._rows).values()]):
            return False
        return self.fit_metric(stored.shrinkage) is not None

    def _first_view(self) -> StoredView:
        if self._views:
            return self._plain.view(None)[0]
        if (view := next(iter(self._rows.views().values()), None)) is None:
            raise empty_error(self._rows)
        return view

    def set_note(self, name: str, value: str) -> None:
        """Store a text of the caller in the file, such as how to build the embedder again."""
        self._rows.set_note(name, value)

    def get(self, id: str) -> Example:
        """Return an example by its id, or by an unambiguous prefix of at least four characters."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        found = self._rows.get(ids)
        return [found.get(id) or self._by_prefix(id) for id in ids]

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        """Return the images with these hashes that examples of this namespace contain, by hash."""
        return self._rows.images(sha256s)

    def ids(
        self,
        *,
        label: str | None = None,
        source: str | None = None,
        tags: Mapping[str, str] | None = None,
        where: Filter | None = None,
    ) -> list[str]:
        """Return the ids of the examples that satisfy every filter, in insertion order."""
        parts: list[Filter] = [] if where is None else [where]
        parts += [Eq("label", label)] if label is not None else []
        parts += [Eq("source", source)] if source is not None else []
        parts += [Eq(f"tags.{name}", value) for name, value in (tags or {}).items()]
        return self._rows.ids_where(And(tuple(parts)))

    def labels(self) -> list[str]:
        """Return the distinct labels in order of first appearance."""
        return list(self._rows.labels())

    def ids_by_label(self) -> dict[str, list[str]]:
        return self._rows.labels()

    def is_multi_label(self) -> bool:
        """Return whether any example has several labels, or an empty list of labels."""
        return self._rows.is_multi_label()

    def contradictions(self) -> list[list[str]]:
        """Return groups of ids: examples with the same images and question but different
        answers."""
        return self._rows.contradictions()

    def label_supports(self, *, seed: int = 0) -> list[LabelSupport]:
        """Return the labelled examples whose labels lose a vote of the others, the smallest share
        first: their labels may be wrong. See `label_support.label_supports`."""
        return label_supports(self._rows, seed=seed)

    def note(self, name: str) -> str | None:
        return self._rows.note(name)

    @property
    def namespace(self) -> str:
        return self._rows.namespace

    def views(self) -> dict[str, StoredView]:
        """Return the views of the file by name, in order of creation; all namespaces share them."""
        return self._rows.views()

    def namespaces(self) -> dict[str, int]:
        """Return the number of examples by namespace, sorted by name; empty namespaces are
        absent."""
        return self._rows.namespaces()

    def last_change(self) -> int:
        """Return a number that grows with every addition, change and deletion by any process."""
        return self._rows.last_seq()

    def changes(self, since: int = 0) -> Iterator[ExampleChange]:
        """Yield the examples stored or deleted after change number `since`, in order.

        A derived structure applies each change and continues from the last `seq`. The log drops
        entries of deleted rows: a reader that is too far behind gets `LogPrunedError` and starts
        again from 0.
        """
        pruned_before = self._rows.pruned()
        complete = since == 0 or since >= pruned_before
        while True:
            page = self._rows.example_changes_since(since, PAGE)
            # Read after the page: another process may have pruned before the page was read.
            pruned = self._rows.pruned()
            if since < pruned and not (complete and pruned == pruned_before):
                raise LogPrunedError(
                    f"the change log has lost entries after change {since}",
                    hint="rebuild from changes(0), which yields every example",
                )
            if not page:
                return
            yield from page
            since = page[-1].seq

    def metadata(self, id: str) -> RowMetadata:
        """Return age, pin and counters of an example, by its id or an unambiguous prefix."""
        self._uses.flush()
        found = self._rows.metadata_by_id(self._rows.keys(full_ids(self._rows, [id])).values())
        if not found:  # another process has deleted it meanwhile
            raise unknown_id_error(id)
        return next(iter(found.values()))

    def stats(self) -> Stats:
        return stats_of(self._rows, self._path, self._metric_name())

    def _repr_html_(self) -> str:
        """Return the sizes and, for the most frequent labels, an example each."""
        return render_stats(self._rows, self._path, self._metric_name())

    def _metric_name(self) -> str:
        if self._views or not self._uses_stored_metric:
            return self._searcher.metric
        used = metric_in_use(self._rows)
        return self._searcher.metric if used is None else metric_name(used.shrinkage)

    def __len__(self) -> int:
        return self._rows.count()

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples in insertion order, without those deleted during the iteration."""
        pending = iter(self._rows.ids_where())
        while ids := list(islice(pending, ITERATION_BATCH)):
            found = self._rows.get(ids)
            yield from (found[id] for id in ids if id in found)

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
        plain: bool = False,
    ) -> list[Candidate]:
        """Return the `k` nearest examples, best first; fewer only if there are fewer.

        Excludes the query's own id and, by `exclude`, every example that shares an image with it or
        only the same question (images, text, choices, context). `include_self` excludes nothing.
        `by` names the view; `where` and `within` (ids) restrict the search. With `plain`, a fitted
        metric is not used. Raises `EmptyKnowledgeBaseError` for an empty knowledge base.
        """
        scope = SearchScope(by, where, within, exclude, plain)
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
        plain: bool = False,
    ) -> list[list[Candidate]]:
        """Search several queries at once, as `search` does one."""
        return self._search(
            queries, k, SearchScope(by, where, within, exclude, plain), include_self
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
        plain: bool = False,
    ) -> list[list[Candidate]]:
        """Search by vectors (n, dimension) of the caller, as `search_many` does by queries.

        `excluded_for` are the queries that the vectors embed; `exclude` applies to each.
        """
        _check_k(k)
        self._check_embeds()
        scope = SearchScope(by, where, within, exclude, plain)
        return self._searcher.nearest(vectors, k, scope, excluded_for)

    def class_means(self, query: Query, vector: Vectors | None = None) -> list[Candidate]:
        """Return the mean of each class as a candidate, with its cosine under the fitted metric;
        none without such a metric. Examples that share an image with the query do not count. With
        its `vector`, the query is not embedded. The candidate's image is a placeholder."""
        if (fitted := self.fitted) is None:
            return []
        vectors = self.embed([query]) if vector is None else vector[None]
        return fitted.class_means(vectors, [query])[0]

    @property
    def stored_metric(self) -> StoredMetric | None:
        """The fitted metric stored for a view's embedder; None for the plain cosine, a damaged
        metric, or one of another embedder."""
        return metric_in_use(self._rows)

    @property
    def fitted(self) -> FittedSearch | None:
        """The search under the fitted metric, None without one."""
        return self._searcher if isinstance(self._searcher, FittedSearch) else None

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

    def vectors(self, ids: Sequence[str], by: str | None = None) -> Vectors:
        """Return the stored vectors (n, dimension), float32, in the order of the ids."""
        self._check_embeds()
        return self._searcher.vectors(ids, by)

    def leave_one_out_scores(
        self, k: int, *, by: str | None = None, sample: int = 500, seed: int = 0
    ) -> Vectors:
        """Return the scores (n, k) of the `k` nearest examples with other images, best first, of
        at most `sample` examples. Examples with fewer than `k` such others are excluded. Compares
        by the plain metric, also if a fitted one is stored."""
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
        image with it, best first, by the plain metric. Reads no images, so it suits many ids."""
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
        view, _ = self._views.choose(self._rows.views(), by)
        return {} if view is None else self._rows.vectors_of_images(sha256s, view.number)

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

    def reindex(
        self, name: str, view: View | Embedder, *, batch_size: int = 64, progress: Progress = False
    ) -> int:
        """Embed every example of the file, in all namespaces, with another embedder or for a new
        view; return the number embedded.

        Searches use the old vectors until all new ones exist. An interrupted run resumes.
        `progress` is as in `add`; a callback first receives the number that earlier runs have done.
        """
        view = view if isinstance(view, View) else View(view)
        total = sum(self._rows.namespaces().values())
        with showing_progress("Embedding", total, progress) as step:
            done = reindex(self._rows, name, view, batch_size=batch_size, progress=step)
        self._views.replace(name, view, self._rows.views())
        self._searcher.close_indexes()
        if self._views and self._uses_stored_metric:  # the old metric was of the old vectors
            self._searcher = with_stored_metric(self._rows, self._plain, required=False)
        return done

    def drop_view(self, name: str) -> None:
        """Delete the vectors of a view, in all namespaces. Other handles that were opened with it
        fail unless it is `optional`. Raises `SettingError` for the only view."""
        stored = self._rows.views()
        if stored.keys() == {name}:
            raise SettingError(
                f"the view {name!r} is the only view", hint="add another view with reindex first"
            )
        self._searcher.close_indexes()  # writes index files
        self._rows.drop_view(name)

    def verify(
        self, *, deep: bool = False, repair: bool = False, stages: Stages = no_stages
    ) -> VerificationReport:
        """Compare images with their hashes, vectors with their checksums, and change log and index
        files with the rows, in all namespaces. `deep` also re-embeds every example, and finds
        vectors of another example or embedder. `repair` rebuilds derived parts (vectors with this
        handle's embedders). `stages` receives the title and the number of steps of each stage,
        and returns a context manager that yields a function to count finished steps."""
        self._searcher.close_indexes()  # writes the index files, which are verified too
        views = self._views.resolve(self._rows.views()) if self._views else {}
        return verify(self._rows, views, deep=deep, repair=repair, stages=stages)

    def is_made_by(self, name: str, view: View) -> bool:
        """Return whether the view reproduces any vector of that name among the first examples. A
        view with another `to_query` does not."""
        return makes_vectors(self._rows, name, view)

    def export_to(
        self, folder: str | Path, *, on_error: OnError | None = None, progress: Progress = False
    ) -> int:
        """Write this namespace as examples.jsonl and images/ to a new folder; return the number of
        examples written. A damaged example goes to `on_error`, which raises by default."""
        self._uses.flush()
        with showing_progress("Exporting", len(self), progress) as step:
            return export(self._rows, Path(folder), error_handler(on_error), step)

    def _check_embeds(self) -> None:
        if not self._views:
            raise SettingError(
                f"{self._path} was opened without an embedder",
                hint="pass embed= to KnowledgeBase.open to search or to add",
            )

    def _by_prefix(self, prefix: str) -> Example:
        id = full_id(self._rows, prefix)
        example = self._rows.get([id]).get(id)
        if example is None:  # deleted by another process meanwhile
            raise unknown_id_error(prefix)
        return example
