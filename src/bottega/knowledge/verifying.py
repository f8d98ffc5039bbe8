"""Whether a file is what it should be: images against hashes, vectors and indexes against rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bottega.errors import BottegaError, StoreError
from bottega.knowledge.database import listed
from bottega.knowledge.index_files import index_files, wrong_index_files
from bottega.knowledge.ports import StoredView
from bottega.knowledge.records import identity
from bottega.knowledge.reindexing import embed_again, reindex
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.views import View
from bottega.types import Example

log = logging.getLogger(__name__)

PAGE = 256
NO_EXAMPLE = "NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = {table}.key)"
NO_VIEW = "NOT EXISTS (SELECT 1 FROM views WHERE views.number = vectors.view)"
NO_USE = "NOT EXISTS (SELECT 1 FROM example_images AS e WHERE e.sha256 = images.sha256)"


@dataclass(frozen=True)
class Problem:
    """`repaired` only where it could be derived again; an image's bytes cannot."""

    what: str
    repaired: bool


@dataclass(frozen=True)
class Verified:
    """What was looked at, in every namespace, and what was wrong with it."""

    examples: int
    images: int
    vectors: int
    snapshots: int
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return all(problem.repaired for problem in self.problems)


Repair = Callable[[], None]
Finding = tuple[str, Repair | None]


def verify(rows: SqliteRows, views: Mapping[str, View], *, repair: bool) -> Verified:
    checks = (_pages, _leftovers, _views, _images, _identities, _vectors, _log, _index_files)
    found = [
        (what, repair and mend is not None and _succeeds(mend))
        for check in checks
        for what, mend in check(rows, views)
    ]
    again = any(mended for _, mended in found)
    left = [what for check in checks for what, _ in check(rows, views)] if again else []
    problems = [Problem(what, mended and what not in left) for what, mended in found]
    known = {what for what, _ in found}
    problems += [Problem(what, repaired=False) for what in left if what not in known]
    examples, images, vectors = (
        int(rows.read(f"SELECT count(*) FROM {table}")[0][0])
        for table in ("examples", "images", "vectors")
    )
    snapshots = len(index_files(rows))
    return Verified(examples, images, vectors, snapshots, tuple(problems))


def _succeeds(mend: Repair) -> bool:
    """What one failure leaves as it was shall not keep the rest from being mended."""
    try:
        mend()
    except (BottegaError, OSError) as error:
        log.warning("not repaired: %s", error)
        return False
    return True


def _pages(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    for row in rows.read("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"SQLite: {row[0]}", None


def _images(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    for (sha256,) in rows.read("SELECT sha256 FROM images ORDER BY sha256"):
        chosen = "SELECT CAST(data AS BLOB) FROM images WHERE sha256 = ?"
        for (data,) in rows.read(chosen, sha256):
            if hashlib.sha256(data).hexdigest() != sha256:
                yield f"the bytes of image {sha256} are not those that were stored", None
    for row in rows.read(
        "SELECT DISTINCT sha256 FROM example_images"
        " WHERE NOT EXISTS (SELECT 1 FROM images WHERE images.sha256 = example_images.sha256)"
    ):
        yield f"image {row[0]} is missing", None


def _identities(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    for keys in _paged(rows, "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"):
        try:
            for wrong in _other_identities(rows, keys):
                yield wrong, None
        except StoreError:  # one of them cannot be read
            for key in keys:
                try:
                    for wrong in _other_identities(rows, [key]):
                        yield wrong, None
                except StoreError as error:
                    yield f"row {key} cannot be read: {error}", None


def _other_identities(rows: SqliteRows, keys: list[int]) -> list[str]:
    return [
        f"example {example.id} has another question, answer or image"
        for example in rows.by_keys(keys).values()
        if not _is_itself(example)
    ]


def _is_itself(example: Example) -> bool:
    try:
        return identity(example) == example.id
    except TypeError:  # a field that is no text
        return False


def _leftovers(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    where = {table: NO_EXAMPLE.format(table=table) for table in ("vectors", "example_images")}
    where |= {"uses": NO_EXAMPLE.format(table="uses"), "images": NO_USE}
    for table, orphaned in where.items():
        ((number,),) = rows.read(f"SELECT count(*) FROM {table} WHERE {orphaned}")
        if number:
            mend = _executed(rows, f"DELETE FROM {table} WHERE {orphaned}")
            yield f"{number} {table} of no example", mend
    ((number,),) = rows.read(f"SELECT count(*) FROM vectors WHERE {NO_VIEW}")
    if number:
        yield (
            f"{number} vectors of no view",
            _executed(rows, f"DELETE FROM vectors WHERE {NO_VIEW}"),
        )


def _views(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    """Without one that is complete nothing can be found, and nothing else would be missed."""
    if rows.views() or not rows.read("SELECT 1 FROM examples LIMIT 1"):
        return

    def mend() -> None:
        for name, view in views.items():
            reindex(rows, name, view, batch_size=PAGE, progress=None)

    if views:
        yield "the examples have no vectors at all", mend
    else:
        yield "the examples have no vectors at all; repaired only with the embedder", None


def _vectors(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    for stored in rows.views().values():
        wrong = list(_wrong_vectors(rows, stored))
        view = views.get(stored.name)
        if wrong and view is not None:
            yield f"{len(wrong)} vectors {stored.name!r}", _embedding(rows, wrong, stored, view)
        elif wrong:
            yield f"{len(wrong)} vectors {stored.name!r}; repaired only with the embedder", None


def _embedding(rows: SqliteRows, keys: list[int], stored: StoredView, view: View) -> Repair:
    def mend() -> None:
        for start in range(0, len(keys), PAGE):
            embed_again(rows, keys[start : start + PAGE], stored.number, view)

    return mend


def _wrong_vectors(rows: SqliteRows, view: StoredView) -> Iterator[int]:
    """Keys whose vector is missing, of another length, or not finite."""
    for keys in _paged(rows, "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"):
        found = rows.read(
            "SELECT chosen.value, CAST(vector AS BLOB) FROM json_each(?) AS chosen"
            " LEFT JOIN vectors ON vectors.key = chosen.value AND view = ?",
            listed(keys),
            view.number,
        )
        for key, blob in found:
            whole = blob is not None and len(blob) == 4 * view.dimension
            if not whole or not np.isfinite(np.frombuffer(blob, np.float32)).all():
                yield key


def _log(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    """An index that follows the log must end up with the rows that are there."""
    untold = (
        "FROM examples WHERE coalesce((SELECT op FROM changes WHERE changes.key = examples.key"
        " ORDER BY seq DESC LIMIT 1), 'delete') != 'put'"
    )
    last = "SELECT key, max(seq) AS seq FROM changes WHERE key > 0 GROUP BY key"
    left = (
        f"FROM ({last}) AS last JOIN changes USING (seq) WHERE changes.op = 'put'"
        " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)"
    )
    for op, source, chosen in (("put", "examples", untold), ("delete", "changes", left)):
        ((number,),) = rows.read(f"SELECT count(*) {chosen}")
        if number:
            statement = (
                "INSERT INTO changes (op, key, id, namespace)"
                f" SELECT '{op}', {source}.key, {source}.id, {source}.namespace {chosen}"
            )
            yield f"{number} rows whose {op} is not in the change log", _executed(rows, statement)


def _index_files(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    for what, path in wrong_index_files(rows):
        yield what, path.unlink if path.is_file() else None


def _executed(rows: SqliteRows, statement: str) -> Repair:
    def mend() -> None:
        with rows.transaction() as connection:
            connection.execute(statement)

    return mend


def _paged(rows: SqliteRows, statement: str) -> Iterator[list[int]]:
    key = 0
    while keys := [row[0] for row in rows.read(statement, key, PAGE)]:
        yield keys
        key = keys[-1]
