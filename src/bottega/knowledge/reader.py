"""Operations of a knowledge base that need no embedder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from bottega import notebook
from bottega.errors import BottegaError, NotFoundError, SettingError
from bottega.image import Image
from bottega.knowledge.filters import And, Eq, Filter
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.records import StoredView
from bottega.knowledge.stores import RowStore
from bottega.types import Example

SHORTEST_PREFIX = 4
ITERATION_BATCH = 64
MAX_DISPLAYED = 20_000  # examples of a knowledge base whose labels a notebook counts


@dataclass(frozen=True)
class Stats:
    """Size and settings of the knowledge base at `path`.

    `examples`, different `images`, different `labels` and `pinned` examples are counted. `metric`
    compares vectors; `format_version` is the version of the stored format. `bytes` is the size of
    the whole file; all other numbers are of this namespace. `views` maps names to fingerprints;
    `embedder` and `dimension` are those of the first view, or None without a view.
    """

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
    metric: VectorMetric
    format_version: int


class KnowledgeBaseReader:
    """Operations of a knowledge base that need no embedder."""

    def __init__(self, rows: RowStore, path: str, metric: VectorMetric) -> None:
        self._rows = rows
        self._path = path
        self._metric: VectorMetric = metric

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

    def note(self, name: str) -> str | None:
        return self._rows.note(name)

    def set_note(self, name: str, value: str) -> None:
        """Store a text of the caller in the file, such as how to build the embedder again."""
        self._rows.set_note(name, value)

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

    def _repr_html_(self) -> str:
        """Return the sizes and, for the most frequent labels, an example each."""
        try:
            stats = self.stats()
            ids = self._rows.labels() if stats.examples <= MAX_DISPLAYED else {}
            frequent = sorted(ids, key=lambda label: -len(ids[label]))[: notebook.MAX_IMAGES]
            found = self._rows.get([ids[label][0] for label in frequent])
        except BottegaError as error:
            return notebook.render("problem", error)
        shown = [
            (label, len(ids[label]), found[ids[label][0]])
            for label in frequent
            if ids[label][0] in found  # another process may have deleted it
        ]
        return notebook.render("knowledge_base", stats, shown)

    def __len__(self) -> int:
        return self._rows.count()

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples in insertion order, without those deleted during the iteration."""
        pending = iter(self._rows.ids_where())
        while ids := list(islice(pending, ITERATION_BATCH)):
            found = self._rows.get(ids)
            yield from (found[id] for id in ids if id in found)

    def _resolve_ids(self, ids: Iterable[str]) -> set[str]:
        ids = [ids] if isinstance(ids, str) else list(ids)
        complete = self._rows.keys(ids)
        return {id if id in complete else self._resolve(id) for id in ids}

    def _by_prefix(self, prefix: str) -> Example:
        id = self._resolve(prefix)
        example = self._rows.get([id]).get(id)
        if example is None:  # deleted by another process meanwhile
            raise unknown_id_error(prefix)
        return example

    def _resolve(self, id: str) -> str:
        if len(id) < SHORTEST_PREFIX:
            raise SettingError(
                f"an id prefix must have at least {SHORTEST_PREFIX} characters, got {id!r}",
                hint="give more characters",
            )
        matches = self._rows.ids_with_prefix(id, limit=2)
        if not matches:
            raise unknown_id_error(id)
        if len(matches) > 1:
            raise SettingError(
                f"the id prefix {id!r} is ambiguous, matching {' and '.join(matches)}",
                hint="give more characters",
            )
        return matches[0]


def check_known(ids: Collection[str], known: Collection[str]) -> None:
    """Raise `NotFoundError` for an id that is not known."""
    if unknown := set(ids).difference(known):
        raise unknown_id_error(min(unknown))


def unknown_id_error(id: str) -> NotFoundError:
    return NotFoundError(f"no example has the id {id!r}", hint="bottega ls shows the ids")
