"""Knowledge base: examples in one file, searched by the vectors of their embedders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Self

from bottega._util.executor import batched
from bottega._util.identity import identity
from bottega._util.postgres import postgres_url
from bottega._util.progress import (
    Progress,
    Stages,
    Step,
    no_stages,
    showing_progress,
    size_of,
)
from bottega.errors import (
    EmbedderMismatchError,
    LogPrunedError,
    OnError,
    SettingError,
    StoreError,
    error_handler,
)
from bottega.image import path_text
from bottega.knowledge.batch import check_annotation, embedded_batches, reindex, replace_batch
from bottega.knowledge.copy_store import check_finished
from bottega.knowledge.embedders.names import note_of, open_embedder, packaged_name
from bottega.knowledge.eviction import Capacity, Eviction, LeastRecentlyUsedEviction, UsageBuffer
from bottega.knowledge.index.index_files import delete_index_files
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.reader import unknown_id_error
from bottega.knowledge.records import RowMetadata, View, Views, is_text, to_json
from bottega.knowledge.search import FileSearch, KnowledgeBaseSearch
from bottega.knowledge.sqlite.database import CloseOnExit
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.stores import RowStore, VectorSearch
from bottega.knowledge.transfer import count_exported, export, read_export
from bottega.knowledge.verification import VerificationReport, makes_vectors, verify
from bottega.protocols import Embedder
from bottega.types import Example, ExampleChange

PAGE = 4096
HNSW_ABOVE = 50_000
POSTGRES_HNSW_ABOVE = 2_500  # where comparing all rows takes as long as searching the index


def _open_rows(path: str | Path, *, create: bool, embeds: bool, namespace: str) -> RowStore:
    if (url := postgres_url(path)) is None:
        create = create and (embeds or not Path(path).exists())
        return SqliteRows(str(path), create=create, namespace=namespace)
    from bottega.knowledge.postgres.rows import PostgresRows  # needs the extra [shared]

    return PostgresRows(url, namespace, create=create)


def _with_names(error: EmbedderMismatchError) -> EmbedderMismatchError:
    """Return the error with a hint that names the packaged embedders."""
    stored, given = (packaged_name(one) or one for one in (error.stored, error.given))
    omit = "" if stored == error.stored else f"omit embed= to open it with {stored}, or "
    hint = f"{omit}build a new file with {given}"
    return EmbedderMismatchError(error.stored, error.given, hint=hint)


def _search_of(
    rows: RowStore, views: Views, metric: VectorMetric, hnsw_above: int | None, vectors: str | None
) -> VectorSearch:
    if isinstance(rows, SqliteRows):
        if vectors is not None:
            raise SettingError(
                f"vectors requires a knowledge base in PostgreSQL, got {rows.name}",
                hint="open postgresql://user@host/database, or remove vectors",
            )
        return FileSearch(rows, views, metric, HNSW_ABOVE if hnsw_above is None else hnsw_above)
    from bottega.knowledge.postgres.rows import PostgresRows
    from bottega.knowledge.postgres.search import PostgresSearch

    assert isinstance(rows, PostgresRows)
    above = POSTGRES_HNSW_ABOVE if hnsw_above is None else hnsw_above
    if vectors is None or not views:
        return PostgresSearch(rows, views, metric, above)
    from bottega.knowledge.milvus.database import MilvusDatabase  # needs the extra [milvus]
    from bottega.knowledge.milvus.search import MilvusSearch

    return MilvusSearch(rows, views, metric, above, MilvusDatabase(vectors))


@dataclass(frozen=True)
class AddResult:
    """Numbers of new, duplicate and failed examples."""

    new: int = 0
    duplicates: int = 0
    failed: int = 0

    def __add__(self, more: AddResult) -> AddResult:
        return AddResult(
            self.new + more.new, self.duplicates + more.duplicates, self.failed + more.failed
        )


class KnowledgeBase(KnowledgeBaseSearch, CloseOnExit):
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
        metric: VectorMetric = "cosine",
        capacity: Capacity | None = None,
        hnsw_above: int | None = None,
        vectors: str | None = None,
    ) -> None:
        views = Views(embed)
        search = _search_of(rows, views, metric, hnsw_above, vectors)
        super().__init__(rows, path, metric, views, search)
        self._capacity = capacity
        self._uses = UsageBuffer(rows.add_uses)
        self._views.resolve(rows.views())

    @classmethod
    def open(
        cls,
        path: str | Path,
        embed: Embedder | Mapping[str, View] | Literal["stored"] | None = "stored",
        *,
        metric: VectorMetric = "cosine",
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
        raises `EmbedderMismatchError`. The metric concerns only the search and may change.

        `capacity` limits the examples of the namespace after every commit: `evict` selects those to
        remove (default: least recently used) and spares pinned ones. Search is exact up to
        `hnsw_above` examples (default: 50,000, in PostgreSQL 2,500). In a read-only folder, writes
        of other processes are visible only if one of them opened the file first. `vectors` is the
        URL of a Milvus database, e.g. `milvus://host:19530/database`, that keeps the search index
        of a large knowledge base in PostgreSQL.
        """
        if embed == "stored":
            embed = cls._stored_views(path, namespace)
        if not (embed is None or isinstance(embed, Mapping) or hasattr(embed, "fingerprint")):
            raise SettingError(
                f"embed must be an Embedder, got {embed!r:.80}",
                hint="pass TowerEmbedder.bundled(), PixelEmbedder() or SentenceEmbedder(name)",
            )
        if metric not in ("cosine", "l2"):
            raise SettingError(
                f"metric must be 'cosine' or 'l2', got {metric!r}", hint="use metric='cosine'"
            )
        if not is_text(namespace):
            raise SettingError(
                f"namespace must be a text without NULs, got {namespace!a}",
                hint="use a text such as 'a'",
            )
        if capacity is None and evict is not None:
            raise SettingError("evict requires a capacity", hint="pass capacity=10_000 to open")
        if capacity is not None and capacity < 1:
            raise SettingError(
                f"capacity must be at least 1, got {capacity}", hint="use capacity=10_000"
            )
        evict = evict or LeastRecentlyUsedEviction()
        limit = None if capacity is None else Capacity(capacity, evict)
        rows = _open_rows(path, create=create, embeds=embed is not None, namespace=namespace)
        try:
            check_finished(rows)
            return cls(
                rows,
                embed,
                path=rows.name if postgres_url(path) else path_text(path),
                metric=metric,
                capacity=limit,
                hnsw_above=hnsw_above,
                vectors=vectors,
            )
        except BaseException as error:
            rows.close()
            if isinstance(error, EmbedderMismatchError):
                raise _with_names(error) from error
            raise

    @classmethod
    def _stored_views(cls, path: str | Path, namespace: str) -> dict[str, View]:
        """Return the views of a file with the embedders that its fingerprints or notes name."""
        hint = "pass embed=, e.g. KnowledgeBase.open(path, TowerEmbedder.bundled())"
        if postgres_url(path) is None and not Path(path).exists():
            raise SettingError(f"embed is missing for the new file {path_text(path)}", hint=hint)
        with cls.open(path, None, create=False, namespace=namespace) as rows:
            stored = rows.views()
            names = {
                name: packaged_name(view.fingerprint) or rows.note(note_of(view))
                for name, view in stored.items()
            }
        unknown = [stored[name].fingerprint for name, spec in names.items() if spec is None]
        if unknown or not names:
            problem = f"names no embedder for {unknown[0]!r}" if unknown else "has no vectors yet"
            raise StoreError(f"{path_text(path)} {problem}", hint=hint)
        return {name: View(open_embedder(str(spec))) for name, spec in names.items()}

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
        (full_id,) = self._resolve_ids([id])
        if not self._rows.annotate(full_id, fields, tags):
            raise unknown_id_error(id)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete the examples and return their number. Deletes none if an id is unknown or
        ambiguous."""
        return self._rows.delete(self._resolve_ids(ids))

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

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None:
        """Record that these examples were shown and share `saved_usd` US dollars of savings.

        Eviction policies read these counts. They are kept in memory and written in batches. Unknown
        ids are ignored, because an example may have been evicted after it was shown.
        """
        self._uses.record([ids] if isinstance(ids, str) else ids, saved_usd)

    def metadata(self, id: str) -> RowMetadata:
        """Return age, pin and counters of an example, by its id or an unambiguous prefix."""
        self._uses.flush()
        found = self._rows.metadata_by_id(self._rows.keys(self._resolve_ids([id])).values())
        if not found:  # another process has deleted it meanwhile
            raise unknown_id_error(id)
        return next(iter(found.values()))

    def pin(self, ids: Collection[str]) -> int:
        """Protect these examples from eviction and return the number newly pinned. Pins none if an
        id is unknown."""
        return self._rows.pin(self._resolve_ids(ids), True)

    def unpin(self, ids: Collection[str]) -> int:
        """Remove the pins and return their number."""
        return self._rows.pin(self._resolve_ids(ids), False)

    def reindex(
        self,
        name: str,
        view: View | Embedder,
        *,
        batch_size: int = 64,
        progress: Progress = False,
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
        if isinstance(self._rows, SqliteRows):
            delete_index_files(self._rows, name)
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
        self,
        folder: str | Path,
        *,
        on_error: OnError | None = None,
        progress: Progress = False,
    ) -> int:
        """Write this namespace as examples.jsonl and images/ to a new folder; return the number of
        examples written. A damaged example goes to `on_error`, which raises by default."""
        self._uses.flush()
        with showing_progress("Exporting", len(self), progress) as step:
            return export(self._rows, Path(folder), error_handler(on_error), step)

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

    def close(self) -> None:
        """Write the use counters and save large indexes to files beside the database."""
        with closing(self._rows):
            try:
                self._uses.flush()
            finally:
                self._searcher.close_indexes()
