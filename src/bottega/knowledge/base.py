"""The knowledge base: worked examples that can be found again by what they look like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from bottega.errors import (
    EmbedderMismatchError,
    EmptyKnowledgeBaseError,
    NotFoundError,
    SettingError,
)
from bottega.image import path_text
from bottega.knowledge.adding import store_batch
from bottega.knowledge.bad import OnBad, or_raise
from bottega.knowledge.index import FlatIndex, Metric
from bottega.knowledge.ports import Hit, RowStore, VectorIndex
from bottega.knowledge.rows import SqliteRows
from bottega.protocols import Embedder
from bottega.types import Candidate, Example, Query

SHORTEST_PREFIX = 4
PAGE = 4096
EXAMPLES_AT_ONCE = 64


@dataclass(frozen=True)
class Added:
    new: int = 0
    duplicates: int = 0
    bad: int = 0


@dataclass(frozen=True)
class Stats:
    """`bytes` is the size of the file. Embedder and dimension are None while it is empty."""

    path: str
    examples: int
    images: int
    labels: int
    bytes: int
    embedder: str | None
    dimension: int | None
    metric: Metric
    format_version: int


class KnowledgeBase:
    """Examples in one file, searched by the vectors of one embedder.

    Any number of threads and processes may use the file at once: a search sees whatever any of
    them has added. Every method blocks; keep it off the event loop. Raises `StoreError`.
    """

    def __init__(
        self, rows: RowStore, embed: Embedder | None, *, path: str, metric: Metric = "cosine"
    ) -> None:
        self._rows = rows
        self._embed = embed
        self._path = path
        self._metric: Metric = metric
        self._index: VectorIndex | None = None
        self._following = Lock()
        self._tied()

    @classmethod
    def open(
        cls,
        path: str | Path,
        embed: Embedder | None,
        *,
        metric: Metric = "cosine",
        create: bool = True,
    ) -> Self:
        """Opens or creates a file; `:memory:` keeps nothing.

        Without an embedder the examples can be listed, shown and deleted, not searched, and a file
        that is there but empty is left as it is (`StoreError`). The first `add` ties the file to
        its embedder; opening it with another raises `EmbedderMismatchError`. The metric only
        concerns the search and may change.
        """
        if metric not in ("cosine", "l2"):
            raise SettingError(f"no metric {metric!r}", hint="use 'cosine' or 'l2'")
        create = create and (embed is not None or not Path(path).exists())
        rows = SqliteRows(str(path), create=create)
        try:
            return cls(rows, embed, path=path_text(path), metric=metric)
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
        embed = self._embedder()
        if batch_size < 1:
            raise SettingError(f"batch_size {batch_size} is not possible", hint="use 64")
        pending = iter(examples)
        total = Added()
        while taken := list(islice(pending, batch_size)):
            new, bad = store_batch(taken, self._rows, embed, or_raise(on_bad))
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
        include_self: bool = False,
        within: Collection[str] | None = None,
    ) -> list[Candidate]:
        """The `k` nearest examples, best first; fewer only if there are fewer.

        Never the query's own id or image unless `include_self`. `within` restricts the search to
        these ids. An empty knowledge base raises `EmptyKnowledgeBaseError`.
        """
        return self.search_many([query], k, include_self=include_self, within=within)[0]

    def search_many(
        self,
        queries: Sequence[Query],
        k: int,
        *,
        include_self: bool = False,
        within: Collection[str] | None = None,
    ) -> list[list[Candidate]]:
        """As `search`, with all queries embedded and compared at once."""
        if k < 1:
            raise SettingError(f"cannot search for {k} examples", hint="use k >= 1")
        embed = self._embedder()
        self._follow()
        if not queries:
            return []
        vectors = embed.embed(queries)
        while True:
            index = self._follow()
            own = None if include_self else [self._rows.own_keys(query) for query in queries]
            allowed = None if within is None else self._rows.keys(within).values()
            hits = index.search(vectors, k, allowed=allowed, excluded=own)
            candidates = self._candidates(hits)
            if candidates is not None:
                return candidates

    def get(self, id: str) -> Example:
        """By its id or by an unambiguous beginning of at least four characters."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        found = self._rows.get(ids)
        return [found.get(id) or self._by_prefix(id) for id in ids]

    def delete(self, ids: Iterable[str]) -> int:
        """All of them, or none if one is unknown or ambiguous."""
        if isinstance(ids, str):
            ids = [ids]
        ids = list(ids)
        known = self._rows.keys(ids)
        return self._rows.delete({id if id in known else self._resolve(id) for id in ids})

    def ids(
        self,
        *,
        label: str | None = None,
        source: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[str]:
        """In the order of insertion; of those that satisfy every filter."""
        return self._rows.ids_where(label=label, source=source, tags=tags)

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
        return Stats(
            path=self._path,
            examples=size.examples,
            images=size.images,
            labels=len(self._rows.labels()),
            bytes=size.bytes,
            embedder=size.embedder,
            dimension=size.dimension,
            metric=self._metric,
            format_version=size.format_version,
        )

    def close(self) -> None:
        self._rows.close()
        self._index = None

    def __len__(self) -> int:
        return self._rows.footprint().examples

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

    def _embedder(self) -> Embedder:
        if self._embed is None:
            raise SettingError(
                f"{self._path} was opened without an embedder",
                hint="KnowledgeBase.open(path, embed=...) to search or to add",
            )
        return self._embed

    def _tied(self) -> bool:
        """Whether the file belongs to an embedder already; raises if to another than ours."""
        stored = self._rows.footprint().embedder
        if self._embed is not None and stored not in (None, self._embed.fingerprint):
            raise EmbedderMismatchError(str(stored), self._embed.fingerprint)
        return stored is not None

    def _follow(self) -> VectorIndex:
        """The index with every change that any process has committed."""
        with self._following:
            # Asked again: the file may have been empty when it was opened, and another's since.
            if self._index is None and self._tied():
                self._index = FlatIndex(self._embedder().dimension, self._metric)
            if self._index is None or not self._caught_up(self._index):
                raise EmptyKnowledgeBaseError(
                    f"{self._path} holds no examples", hint="add some first: bottega add"
                )
            return self._index

    def _caught_up(self, index: VectorIndex) -> int:
        last = self._rows.last_seq()
        while index.watermark < last:
            index.apply(self._rows.changes_since(index.watermark, PAGE))
        return len(index)

    def _candidates(self, hits: list[list[Hit]]) -> list[list[Candidate]] | None:
        """None if another process has deleted one of them since the search."""
        wanted = {hit.key for found in hits for hit in found}
        examples = self._rows.by_keys(wanted)
        if len(examples) < len(wanted):
            return None
        return [[Candidate(examples[hit.key], hit.score) for hit in found] for found in hits]

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
