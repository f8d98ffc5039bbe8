"""The knowledge base: worked examples that can be found again by what they look like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from bottega.errors import NotFoundError, SettingError
from bottega.image import path_text
from bottega.knowledge.adding import store_batch
from bottega.knowledge.bad import OnBad, or_raise
from bottega.knowledge.eviction import Eviction, LeastRecentlyUsed
from bottega.knowledge.filters import And, Eq, Filter
from bottega.knowledge.index import Metric
from bottega.knowledge.ports import Capacity, Changed, RowStore
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.searching import Searcher
from bottega.knowledge.using import UseBuffer
from bottega.knowledge.views import View, Views
from bottega.protocols import Embedder, Vectors
from bottega.types import Candidate, Example, Query

SHORTEST_PREFIX = 4
PAGE = 4096
EXAMPLES_AT_ONCE = 64
HNSW_ABOVE = 50_000


@dataclass(frozen=True)
class Added:
    new: int = 0
    duplicates: int = 0
    bad: int = 0


@dataclass(frozen=True)
class Stats:
    """`bytes` is the size of the file, everything else is of this namespace. `views` are names and
    fingerprints; embedder and dimension are the first view's, None while there is none."""

    path: str
    namespace: str
    examples: int
    images: int
    labels: int
    pinned: int
    bytes: int
    embedder: str | None
    dimension: int | None
    views: Mapping[str, str]
    metric: Metric
    format_version: int


class KnowledgeBase:
    """Examples in one file, searched by the vectors of their embedders.

    Any number of threads and processes may use the file at once: a search sees whatever any of
    them has added. A handle sees one namespace and nothing of the others. Every method blocks;
    keep it off the event loop. Raises `StoreError`.
    """

    def __init__(
        self,
        rows: RowStore,
        embed: Embedder | Mapping[str, View] | None,
        *,
        path: str,
        metric: Metric = "cosine",
        capacity: Capacity | None = None,
        hnsw_above: int = HNSW_ABOVE,
    ) -> None:
        self._rows = rows
        self._views = Views(embed)
        self._path = path
        self._metric: Metric = metric
        self._capacity = capacity
        self._searcher = Searcher(rows, self._views, metric, hnsw_above)
        self._uses = UseBuffer(rows)
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
        examples a search is exact.
        """
        if metric not in ("cosine", "l2"):
            raise SettingError(f"no metric {metric!r}", hint="use 'cosine' or 'l2'")
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
        on_bad: OnBad | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Added:
        """Stores what is new. Each batch is durable before the next begins.

        The same images, question and answer are the same example. What cannot be decoded or
        embedded goes to `on_bad`, which raises unless it is given; the batches before remain.
        `progress` is told how many examples were done since it was last told.
        """
        self._check_embeds()
        if batch_size < 1:
            raise SettingError(f"batch_size {batch_size} is not possible", hint="use 64")
        views = self._views.over(self._rows.views())
        pending = iter(examples)
        total = Added()
        while taken := list(islice(pending, batch_size)):
            if self._capacity is not None:
                self._uses.flush()  # who may go depends on them
            new, bad = store_batch(taken, self._rows, views, or_raise(on_bad), self._capacity)
            duplicates = len(taken) - new - bad
            total = Added(total.new + new, total.duplicates + duplicates, total.bad + bad)
            if progress is not None:
                progress(len(taken))
        return total

    def search(
        self,
        query: Query,
        k: int,
        *,
        by: str | None = None,
        where: Filter | None = None,
        within: Collection[str] | None = None,
        include_self: bool = False,
    ) -> list[Candidate]:
        """The `k` nearest examples, best first; fewer only if there are fewer.

        Never the query's own id or image unless `include_self`. `by` names the view, `where` and
        `within` (ids) restrict the search. An empty knowledge base raises
        `EmptyKnowledgeBaseError`.
        """
        found = self.search_many(
            [query], k, by=by, where=where, within=within, include_self=include_self
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
    ) -> list[list[Candidate]]:
        """As `search`, with all queries embedded and compared at once."""
        _check_k(k)
        self._check_embeds()
        self._searcher.follow(by)  # before the embedder works for nothing
        if not queries:
            return []
        vectors = self._searcher.view(by)[1].embed.embed(queries)
        own = None if include_self else queries
        return self.nearest(vectors, k, by=by, where=where, within=within, excluded_for=own)

    def nearest(
        self,
        vectors: Vectors,
        k: int,
        *,
        by: str | None = None,
        where: Filter | None = None,
        within: Collection[str] | None = None,
        excluded_for: Sequence[Query] | None = None,
    ) -> list[list[Candidate]]:
        """As `search_many`, by the caller's own vectors (n, dimension).

        `excluded_for` are the queries that they were made of: each one's own id and images are
        left out of what its vector finds.
        """
        _check_k(k)
        self._check_embeds()
        return self._searcher.nearest(
            vectors, k, by=by, where=where, within=within, excluded_for=excluded_for
        )

    def vectors(self, ids: Sequence[str], by: str | None = None) -> Vectors:
        """As they are stored: (n, dimension) float32, in the order of the ids."""
        self._check_embeds()
        return self._searcher.vectors(ids, by)

    def get(self, id: str) -> Example:
        """By its id or by an unambiguous beginning of at least four characters."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        found = self._rows.get(ids)
        return [found.get(id) or self._by_prefix(id) for id in ids]

    def delete(self, ids: Iterable[str]) -> int:
        """All of them, or none if one is unknown or ambiguous."""
        return self._rows.delete(self._resolved(ids))

    def ids(
        self,
        *,
        label: str | None = None,
        source: str | None = None,
        tags: Mapping[str, str] | None = None,
        where: Filter | None = None,
    ) -> list[str]:
        """In the order of insertion; of those that satisfy every filter."""
        parts: list[Filter] = [] if where is None else [where]
        parts += [Eq("label", label)] if label is not None else []
        parts += [Eq("source", source)] if source is not None else []
        parts += [Eq(f"tags.{name}", value) for name, value in (tags or {}).items()]
        return self._rows.ids_where(And(tuple(parts)))

    def changes(self, since: int = 0) -> Iterator[Changed]:
        """What was stored or deleted after change number `since`, for structures derived outside:
        apply each in turn and go on from the last one's `seq`."""
        while page := self._rows.named_changes_since(since, PAGE):
            yield from page
            since = page[-1].seq

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None:
        """These examples were shown, which saved so many US dollars, shared among them. Counted in
        memory and written in batches; what eviction goes by."""
        self._uses.note([ids] if isinstance(ids, str) else ids, saved_usd)

    def pin(self, ids: Collection[str]) -> int:
        """From now on these are never evicted. All of them, or none if one is unknown."""
        return self._rows.pin(self._resolved(ids), True)

    def unpin(self, ids: Collection[str]) -> int:
        return self._rows.pin(self._resolved(ids), False)

    def labels(self) -> list[str]:
        """Distinct labels in the order in which they were first seen."""
        return list(self._rows.labels())

    def ids_by_label(self) -> dict[str, list[str]]:
        return self._rows.labels()

    def is_multi_label(self) -> bool:
        """Whether any example has several labels, or none."""
        return self._rows.is_multi_label()

    def note(self, name: str) -> str | None:
        return self._rows.note(name)

    def set_note(self, name: str, value: str) -> None:
        """Keeps a text of the caller's in the file, such as how to build the embedder again."""
        self._rows.set_note(name, value)

    def stats(self) -> Stats:
        size = self._rows.footprint()
        views = self._rows.views()
        first = next(iter(views.values()), None)
        return Stats(
            path=self._path,
            namespace=self._rows.namespace,
            examples=size.examples,
            images=size.images,
            labels=len(self._rows.labels()),
            pinned=size.pinned,
            bytes=size.bytes,
            embedder=None if first is None else first.fingerprint,
            dimension=None if first is None else first.dimension,
            views={name: view.fingerprint for name, view in views.items()},
            metric=self._metric,
            format_version=size.format_version,
        )

    def settle(self) -> None:
        """Waits for indexes that are being built in the background."""
        self._searcher.settle()

    def close(self) -> None:
        """Writes the use counters, and keeps large indexes in files beside the database."""
        try:
            self._uses.flush()
            self._searcher.forget()
        finally:
            self._rows.close()

    def __len__(self) -> int:
        return self._rows.count()

    def __iter__(self) -> Iterator[Example]:
        """In the order of insertion; what is deleted meanwhile is left out."""
        pending = iter(self._rows.ids_where())
        while ids := list(islice(pending, EXAMPLES_AT_ONCE)):
            found = self._rows.get(ids)
            yield from (found[id] for id in ids if id in found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_embeds(self) -> None:
        if not self._views:
            raise SettingError(
                f"{self._path} was opened without an embedder",
                hint="KnowledgeBase.open(path, embed=...) to search or to add",
            )

    def _resolved(self, ids: Iterable[str]) -> set[str]:
        ids = [ids] if isinstance(ids, str) else list(ids)
        known = self._rows.keys(ids)
        return {id if id in known else self._resolve(id) for id in ids}

    def _by_prefix(self, prefix: str) -> Example:
        id = self._resolve(prefix)
        example = self._rows.get([id]).get(id)
        if example is None:  # deleted by another process since
            raise _unknown(prefix)
        return example

    def _resolve(self, id: str) -> str:
        if len(id) < SHORTEST_PREFIX:
            raise SettingError(
                f"{id!r} is too short for an id", hint=f"give {SHORTEST_PREFIX} characters or more"
            )
        matches = self._rows.ids_with_prefix(id, limit=2)
        if not matches:
            raise _unknown(id)
        if len(matches) > 1:
            raise SettingError(
                f"several ids begin with {id!r}, such as {' and '.join(matches)}",
                hint="give more characters",
            )
        return matches[0]


def _unknown(id: str) -> NotFoundError:
    return NotFoundError(f"no example has the id {id!r}", hint="bottega ls shows the ids")


def _check_k(k: int) -> None:
    if k < 1:
        raise SettingError(f"cannot search for {k} examples", hint="use k >= 1")


def _capacity(rows: int | None, evict: Eviction | None) -> Capacity | None:
    if rows is None:
        if evict is not None:
            raise SettingError("evict needs a capacity", hint="open(..., capacity=10_000)")
        return None
    if rows < 1:
        raise SettingError(f"a capacity of {rows} holds nothing", hint="use capacity >= 1")
    return Capacity(rows, evict or LeastRecentlyUsed())
