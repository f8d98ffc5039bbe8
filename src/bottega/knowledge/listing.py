"""What a knowledge base holds, without searching: rows by id, by filter, by label."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from bottega.errors import NotFoundError, SettingError
from bottega.image import Image
from bottega.knowledge.filters import And, Eq, Filter
from bottega.knowledge.index import Metric
from bottega.knowledge.ports import StoredView
from bottega.knowledge.rows import SqliteRows
from bottega.types import Example

SHORTEST_PREFIX = 4
EXAMPLES_AT_ONCE = 64


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


class Listing:
    """The part of a knowledge base that needs no embedder."""

    def __init__(self, rows: SqliteRows, path: str, metric: Metric) -> None:
        self._rows = rows
        self._path = path
        self._metric: Metric = metric

    def get(self, id: str) -> Example:
        """By its id or by an unambiguous beginning of at least four characters."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        found = self._rows.get(ids)
        return [found.get(id) or self._by_prefix(id) for id in ids]

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        """Those that examples here show, by their sha256."""
        return self._rows.images(sha256s)

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

    def views(self) -> dict[str, StoredView]:
        """By name, in the order in which they came to the file; every namespace has them."""
        return self._rows.views()

    def namespaces(self) -> dict[str, int]:
        """How many examples each namespace of the file holds, in the order of their names; one
        that holds none is not there."""
        counted = "SELECT namespace, count(*) FROM examples GROUP BY namespace ORDER BY namespace"
        return {row[0]: row[1] for row in self._rows.read(counted)}

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

    def __len__(self) -> int:
        return self._rows.count()

    def __iter__(self) -> Iterator[Example]:
        """In the order of insertion; what is deleted meanwhile is left out."""
        pending = iter(self._rows.ids_where())
        while ids := list(islice(pending, EXAMPLES_AT_ONCE)):
            found = self._rows.get(ids)
            yield from (found[id] for id in ids if id in found)

    def _resolved(self, ids: Iterable[str]) -> set[str]:
        ids = [ids] if isinstance(ids, str) else list(ids)
        known = self._rows.keys(ids)
        return {id if id in known else self._resolve(id) for id in ids}

    def _by_prefix(self, prefix: str) -> Example:
        id = self._resolve(prefix)
        example = self._rows.get([id]).get(id)
        if example is None:  # deleted by another process since
            raise unknown(prefix)
        return example

    def _resolve(self, id: str) -> str:
        if len(id) < SHORTEST_PREFIX:
            raise SettingError(
                f"{id!r} is too short for an id", hint=f"give {SHORTEST_PREFIX} characters or more"
            )
        matches = self._rows.ids_with_prefix(id, limit=2)
        if not matches:
            raise unknown(id)
        if len(matches) > 1:
            raise SettingError(
                f"several ids begin with {id!r}, such as {' and '.join(matches)}",
                hint="give more characters",
            )
        return matches[0]


def unknown(id: str) -> NotFoundError:
    return NotFoundError(f"no example has the id {id!r}", hint="bottega ls shows the ids")
