"""Interfaces of a knowledge base: stored rows of one namespace, and their search by vectors; and
what holds for the rows of every store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from bottega._util.identity import Exclude
from bottega._util.progress import Stages
from bottega.errors import SettingError, StoreError
from bottega.image import Image
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.filters import Filter
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.records import (
    EmbeddedBatch,
    Footprint,
    RowMetadata,
    SearchHit,
    StoredView,
    UsageRecord,
    View,
    Views,
    unknown_id_error,
)
from bottega.protocols import Vectors
from bottega.types import Candidate, Example, ExampleChange, Query

# Name of the note that marks an incomplete target. Its value is the source.
UNFINISHED = "unfinished copy of"
WAY_OUT = "run bottega export with the version that wrote it, then bottega import with this one"
ADD_AGAIN = "and add again, or restore the file from a copy"
# The change log keeps so many changes, or a fifth of the number of rows if that is more: an index
# file that lacks a tenth of its rows must remain usable.
KEPT_CHANGES = 10_000
KEPT_SHARE = 5
CHECK_EVERY = 1000  # changes
KEY_PAGE = 256
SHORTEST_PREFIX = 4
Repair = Callable[[], None]
# Description of a problem, and its repair if there is one.
Finding = tuple[str, Repair | None]


def note_key(name: str, namespace: str) -> str:
    """Return the key of a namespace's note: notes belong to the whole file."""
    return f"{name}.{namespace}" if namespace else name


class RowStore(Protocol):
    """Durable examples of one namespace. A key identifies the content of a row and is never reused.
    Writes are durable when they return. Methods block, may be called from several threads while
    other processes write, and raise `StoreError`."""

    namespace: str
    name: str  # for messages

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
        pin: bool = False,
    ) -> int: ...

    def annotate(
        self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]
    ) -> bool: ...

    def delete(self, ids: Collection[str]) -> int: ...

    def pin(self, ids: Collection[str], pinned: bool) -> int: ...

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None: ...

    def set_note(self, name: str, value: str) -> None: ...

    def get(self, ids: Collection[str]) -> dict[str, Example]: ...

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]: ...

    def keys(self, ids: Collection[str]) -> dict[str, int]: ...

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]: ...

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]: ...

    def same_image_keys(self, keys: Collection[int]) -> dict[int, set[int]]: ...

    def ids_where(self, where: Filter | None = None) -> list[str]: ...

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]: ...

    def count(self) -> int: ...

    def labels(self) -> dict[str, list[str]]: ...

    def is_multi_label(self) -> bool: ...

    def contradictions(self) -> list[list[str]]: ...

    def images(self, sha256s: Collection[str]) -> dict[str, Image]: ...

    def note(self, name: str) -> str | None: ...

    def namespaces(self) -> dict[str, int]: ...

    def metadata_by_id(self, keys: Collection[int]) -> dict[int, RowMetadata]: ...

    def footprint(self) -> Footprint: ...

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]: ...

    def last_seq(self) -> int:
        """Return a number that every change of these rows by any process increases."""
        ...

    def pruned(self) -> int: ...

    def views(self) -> dict[str, StoredView]: ...

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]: ...

    def vectors_of_images(self, sha256s: Collection[str], view: int) -> dict[str, Vectors]: ...

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]: ...

    def count_vectors(self, number: int) -> int: ...

    def missing_keys(self, number: int) -> list[int]: ...

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None: ...

    def complete_view(self, name: str, number: int) -> bool: ...

    def drop_view(self, name: str) -> None: ...

    def all_keys(self, after: int, limit: int) -> list[int]:
        """Return the next keys of all namespaces, ascending."""
        ...

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if missing or damaged; deleted keys are absent."""
        ...

    def ids_of(self, keys: Sequence[int]) -> list[str]: ...

    def open_search(
        self, views: Views, metric: VectorMetric, hnsw_above: int | None
    ) -> VectorSearch:
        """Return the search by these views. It is exact up to `hnsw_above` rows."""
        ...

    def checks(self, stages: Stages) -> StoreChecks: ...

    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of examples, images and vectors of all namespaces."""
        ...

    def close(self) -> None: ...


class StoreChecks(NamedTuple):
    """Checks of one kind of store, in the order in which they run: before the vectors, of the
    content (None: compare each example with its hashes), and after the vectors."""

    structure: Iterable[Finding] = ()
    content: Iterable[Finding] | None = None
    derived: Iterable[Finding] = ()
    snapshots: int = 0  # number of index files


class SearchScope(NamedTuple):
    """Part of the rows that a search may return: a view, filters and an exclusion. A search that
    `is_plain` does not use a fitted metric."""

    by: str | None
    where: Filter | None
    within: Collection[str] | None
    exclude: Exclude
    is_plain: bool = False


class VectorSearch(Protocol):
    """Search of the rows by vectors. It finds every row that any process has committed."""

    @property
    def metric(self) -> str: ...

    def view(self, by: str | None) -> tuple[StoredView, View]: ...

    def views(self) -> dict[str, View]:
        """Return the views that new examples are embedded for, possibly cached: `Rows.put` checks
        them again."""
        ...

    def check_filled(self, by: str | None) -> None:
        """Raise `EmptyKnowledgeBaseError` if there are no rows."""
        ...

    def nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]: ...

    def vectors(self, ids: Sequence[str], by: str | None) -> Vectors: ...

    def neighbours(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        """Return the nearest rows of each example that share no image with it."""
        ...

    def close_indexes(self) -> None: ...

    def wait_for_indexes(self) -> None: ...


def check_finished(rows: RowStore) -> None:
    """Raise `StoreError` if the store is an unfinished copy."""
    if (source := rows.note(UNFINISHED)) is not None:
        raise unfinished_error(rows.name, source)


def unfinished_error(name: str, source: str) -> StoreError:
    return StoreError(
        f"{name} is an unfinished copy of {source}",
        hint="repeat bottega migrate FROM TO with the same arguments until it finishes",
    )


def full_ids(rows: RowStore, ids: Iterable[str]) -> set[str]:
    """Return the ids that these ids or prefixes denote; see `full_id`."""
    ids = [ids] if isinstance(ids, str) else list(ids)
    complete = rows.keys(ids)
    return {id if id in complete else full_id(rows, id) for id in ids}


def full_id(rows: RowStore, prefix: str) -> str:
    """Return the only id with this prefix. Raises `SettingError` and `NotFoundError`."""
    if len(prefix) < SHORTEST_PREFIX:
        raise SettingError(
            f"an id prefix must have at least {SHORTEST_PREFIX} characters, got {prefix!r}",
            hint="give more characters",
        )
    matches = rows.ids_with_prefix(prefix, limit=2)
    if not matches:
        raise unknown_id_error(prefix)
    if len(matches) > 1:
        raise SettingError(
            f"the id prefix {prefix!r} is ambiguous, matching {' and '.join(matches)}",
            hint="give more characters",
        )
    return matches[0]


def labels_by_id(rows: RowStore) -> dict[str, tuple[str, ...]]:
    """Return the labels of each labelled example by its id, in insertion order."""
    found: dict[str, list[str]] = {id: [] for id in rows.ids_where()}
    for label, ids in rows.labels().items():
        for id in ids if label else ():
            found.setdefault(id, []).append(label)  # the id may be newer than the first read
    return {id: tuple(labels) for id, labels in found.items() if labels}


def paged_keys(rows: RowStore, size: int = KEY_PAGE) -> Iterator[list[int]]:
    """Yield pages of keys, in all namespaces."""
    key = 0
    while keys := rows.all_keys(key, size):
        yield keys
        key = keys[-1]


def counted_pages(
    rows: RowStore, title: str, stages: Stages, size: int = KEY_PAGE
) -> Iterator[list[int]]:
    """Yield pages of keys as one stage of the verification."""
    with stages(title, rows.sizes()[0]) as step:
        for keys in paged_keys(rows, size):
            yield keys
            step(len(keys))
