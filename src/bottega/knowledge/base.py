"""The knowledge base: worked examples that can be found again by what they look like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from bottega.errors import LogPrunedError, OnError, SettingError, error_handler
from bottega.image import path_text
from bottega.knowledge.batch import check_annotation, replace_batch, store_batch
from bottega.knowledge.database import CloseOnExit
from bottega.knowledge.eviction import Eviction, LeastRecentlyUsedEviction
from bottega.knowledge.index import Metric
from bottega.knowledge.ports import Capacity
from bottega.knowledge.records import RowMetadata, identity, is_text
from bottega.knowledge.reindex import reindex
from bottega.knowledge.rows import SqliteRows, unknown
from bottega.knowledge.search import KnowledgeBaseSearch
from bottega.knowledge.transfer import export, read_export
from bottega.knowledge.use_counts import UsageBuffer
from bottega.knowledge.verification import VerificationReport, makes, verify
from bottega.knowledge.views import View, Views
from bottega.protocols import Embedder
from bottega.types import Example, ExampleChange

PAGE = 4096
HNSW_ABOVE = 50_000


@dataclass(frozen=True)
class AddResult:
    new: int = 0
    duplicates: int = 0
    failed: int = 0

    def __add__(self, more: AddResult) -> AddResult:
        return AddResult(
            self.new + more.new, self.duplicates + more.duplicates, self.failed + more.failed
        )


class KnowledgeBase(KnowledgeBaseSearch, CloseOnExit):
    """Examples in one file, searched by the vectors of their embedders.

    Any number of threads and processes may use the file at once: a search sees whatever any of
    them has added. A handle sees one namespace and nothing of the others. Every method blocks;
    keep it off the event loop. Raises `StoreError`.
    """

    def __init__(
        self,
        rows: SqliteRows,
        embed: Embedder | Mapping[str, View] | None,
        *,
        path: str,
        metric: Metric = "cosine",
        capacity: Capacity | None = None,
        hnsw_above: int = HNSW_ABOVE,
    ) -> None:
        super().__init__(rows, path, metric, Views(embed), hnsw_above)
        self._capacity = capacity
        self._uses = UsageBuffer(rows)
        self._views.over(rows.views())

    @classmethod
    def open(
        cls,
        path: str | Path,
        embed: Embedder | Mapping[str, View] | None,
        *,
        metric: Metric = "cosine",
        create: bool = True,
        capacity: int | None = None,
        evict: Eviction | None = None,
        hnsw_above: int = HNSW_ABOVE,
        namespace: str = "",
    ) -> Self:
        """Opens or creates a file; `:memory:` keeps nothing.

        `embed` is an embedder, or several named views of which the first is the default one.
        Without it the examples can be listed, shown and deleted, not searched, and a file that is
        there but empty is left as it is (`StoreError`). The first `add` ties the file to its
        views; opening it with another embedder raises `EmbedderMismatchError`. The metric only
        concerns the search and may change.

        With a `capacity` no commit leaves more examples in the namespace than that: `evict` says
        who goes (by default who was used longest ago), pinned ones stay. Up to `hnsw_above`
        examples a search is exact. Where the folder may not be written, what others write is seen
        only if one of them had the file open first.
        """
        if metric not in ("cosine", "l2"):
            raise SettingError(f"no metric {metric!r}", hint="use 'cosine' or 'l2'")
        _check_namespace(namespace)
        room = _capacity(capacity, evict)
        create = create and (embed is not None or not Path(path).exists())
        rows = SqliteRows(str(path), create=create, namespace=namespace)
        try:
            return cls(
                rows,
                embed,
                path=path_text(path),
                metric=metric,
                capacity=room,
                hnsw_above=hnsw_above,
            )
        except BaseException:
            rows.close()
            raise

    def add(
        self,
        examples: Iterable[Example],
        *,
        batch_size: int = 64,
        on_error: OnError | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> AddResult:
        """Stores what is new. Each batch is durable before the next begins.

        The same images, context, question, choices and answer are the same example. What cannot be
        decoded or embedded goes to `on_error`, which raises unless it is given; the batches before
        remain.
        `progress` is told how many examples were done since it was last told. `new` also counts
        those that a `capacity` has evicted again.
        """
        return self._added(examples, batch_size, on_error, progress)

    def _added(
        self,
        examples: Iterable[Example],
        batch_size: int,
        on_error: OnError | None,
        progress: Callable[[int], None] | None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
    ) -> AddResult:
        self._check_embeds()
        if batch_size < 1:
            raise SettingError(f"batch_size {batch_size} is not possible", hint="use 64")
        views = self._views.over(self._rows.views())
        pending = iter(examples)
        total = AddResult()
        while taken := list(islice(pending, batch_size)):
            if self._capacity is not None:
                self._uses.flush()  # who may go depends on them
            new, bad = store_batch(
                taken, self._rows, views, error_handler(on_error), self._capacity, metadata_by_id
            )
            total += AddResult(new, len(taken) - new - bad, bad)
            if progress is not None:
                progress(len(taken))
        return total

    def replace(
        self, examples: Sequence[Example], *, on_error: OnError | None = None
    ) -> list[str | None]:
        """Stores newer answers, in one commit: each takes the place of what was answered here to
        the same question (images, text, choices and the tag `context`); of several to one question
        the last. A pinned answer stays, and the newer one is not stored. Their ids in order, that
        of the pinned one where it stays, None for a bad one, which goes to `on_error` as in
        `add`."""
        self._check_embeds()
        if self._capacity is not None:
            self._uses.flush()
        views = self._views.over(self._rows.views())
        return replace_batch(examples, self._rows, views, error_handler(on_error), self._capacity)

    def annotate(
        self, id: str, *, rationale: str | None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Gives an example another rationale, or none, and these tags beside its own. It keeps its
        id, source, age, pin, counters and vectors, and comes last in the order of insertion; who
        follows `changes` is told that it was stored. Durable when it returns. A view that reads
        rationales or tags still has the old vector: `verify(deep=True, repair=True)` makes it anew.

        Raises `NotFoundError`.
        """
        self._annotate(id, {"rationale": rationale}, tags or {})

    def tag(self, id: str, tags: Mapping[str, str]) -> None:
        """As `annotate`, but the rationale stays as it is, whoever wrote it last."""
        self._annotate(id, {}, tags)

    def _annotate(self, id: str, told: Mapping[str, str | None], tags: Mapping[str, str]) -> None:
        check_annotation(told.get("rationale"), tags)
        (whole,) = self._resolved([id])
        if not self._rows.annotate(whole, told, tags):
            raise unknown(id)

    def delete(self, ids: Iterable[str]) -> int:
        """All of them, or none if one is unknown or ambiguous."""
        return self._rows.delete(self._resolved(ids))

    def changes(self, since: int = 0) -> Iterator[ExampleChange]:
        """What was stored or deleted after change number `since`, for structures derived outside:
        apply each in turn and go on from the last one's `seq`. The log forgets rows that are gone:
        who is too far behind gets a `LogPrunedError`, and begins anew from 0."""
        begun = self._rows.pruned()
        whole = since == 0 or since >= begun
        while True:
            page = self._rows.named_changes_since(since, PAGE)
            pruned = self._rows.pruned()
            if since < pruned and not (whole and pruned == begun):
                raise LogPrunedError(
                    f"the change log no longer tells everything after change {since}",
                    hint="begin anew, with nothing: changes(0) tells all that is there",
                )
            if not page:
                return
            yield from page
            since = page[-1].seq

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None:
        """These examples were shown, which saved so many US dollars, shared among them. Counted in
        memory and written in batches; what eviction goes by. Ids that are not here count for
        nothing: what was shown may have been evicted since."""
        self._uses.note([ids] if isinstance(ids, str) else ids, saved_usd)

    def metadata(self, id: str) -> RowMetadata:
        """Its age, pin and counters, by its id or an unambiguous beginning."""
        self._uses.flush()
        with self._rows.snapshot():  # another process may delete it
            found = self._rows.metadata_by_id(self._rows.keys(self._resolved([id])).values())
        return next(iter(found.values()))

    def pin(self, ids: Collection[str]) -> int:
        """From now on these are never evicted: how many were not before. All of them, or none if
        one is unknown."""
        return self._rows.pin(self._resolved(ids), True)

    def unpin(self, ids: Collection[str]) -> int:
        """How many were pinned."""
        return self._rows.pin(self._resolved(ids), False)

    def reindex(
        self,
        name: str,
        view: View | Embedder,
        *,
        batch_size: int = 64,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Gives every example of the file, in all namespaces, the vectors of another embedder, or
        of a view that was not there; how many were embedded. Old vectors are searched until all
        new ones are there; stopped halfway, it goes on where it was. `progress` is first told how
        many it has found done.
        """
        view = view if isinstance(view, View) else View(view)
        done = reindex(self._rows, name, view, batch_size=batch_size, progress=progress)
        self._views.replaced(name, view, self._rows.views())
        self._searcher.forget()
        return done

    def verify(self, *, deep: bool = False, repair: bool = False) -> VerificationReport:
        """Compare images with their hashes, vectors with their checksums, and change log and index
        files with the rows, in all namespaces. `deep` also re-embeds every example, and finds
        vectors of another example or embedder. `repair` rebuilds derived parts (vectors with this
        handle's embedders)."""
        self._searcher.forget()  # its files, too, are looked at
        views = self._views.over(self._rows.views()) if self._views else {}
        return verify(self._rows, views, deep=deep, repair=repair)

    def is_made_by(self, name: str, view: View) -> bool:
        """False if the view makes none of the vectors of that name that the file's first examples
        have: it may read something else of an example."""
        return makes(self._rows, name, view)

    def export_to(
        self,
        folder: str | Path,
        *,
        on_error: OnError | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes this namespace as examples.jsonl and images/ into a new folder; how many examples
        were written. One that is damaged goes to `on_error`, which raises unless it is given."""
        self._uses.flush()
        return export(self._rows, Path(folder), error_handler(on_error), progress)

    def import_from(
        self,
        folder: str | Path,
        *,
        batch_size: int = 64,
        on_error: OnError | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> AddResult:
        """Adds what `export_to` wrote, with age, pins and counters; vectors are made anew."""
        total = AddResult()
        pending = read_export(Path(folder), error_handler(on_error))
        while taken := list(islice(pending, batch_size)):
            examples = [each.example for each in taken]
            # Of equal ones the first is stored.
            metadata_by_id = {identity(each.example): each.metadata for each in reversed(taken)}
            total += self._added(examples, batch_size, on_error, progress, metadata_by_id)
        return total

    def close(self) -> None:
        """Writes the use counters, and keeps large indexes in files beside the database."""
        with closing(self._rows):
            try:
                self._uses.flush()
            finally:
                self._searcher.forget()


def _check_namespace(namespace: str) -> None:
    if not is_text(namespace):
        raise SettingError(f"{namespace!a} cannot name a namespace", hint="use a text such as 'a'")


def _capacity(rows: int | None, evict: Eviction | None) -> Capacity | None:
    if rows is None:
        if evict is not None:
            raise SettingError("evict needs a capacity", hint="open(..., capacity=10_000)")
        return None
    if rows < 1:
        raise SettingError(f"a capacity of {rows} holds nothing", hint="use capacity >= 1")
    return Capacity(rows, evict or LeastRecentlyUsedEviction())
