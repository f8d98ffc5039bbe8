"""Checks of a knowledge base file: images, examples, vectors and index files."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from bottega.errors import BottegaError, StoreError
from bottega.knowledge.database import LISTED, listed
from bottega.knowledge.index_files import index_files, wrong_index_files
from bottega.knowledge.ports import StoredView
from bottega.knowledge.records import damage, is_itself
from bottega.knowledge.reindex import embed_again, reindex
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.views import View
from bottega.knowledge.writer import check_widths
from bottega.protocols import Vectors

Repair = Callable[[], None]
# What is wrong, and how it is made again where it can be.
Finding = tuple[str, Repair | None]

PAGE = 256


def paged_keys(rows: SqliteRows, size: int = PAGE) -> Iterator[list[int]]:
    """Of all examples, in every namespace."""
    chosen = "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"
    key = 0
    while keys := [row[0] for row in rows.read(chosen, key, size)]:
        yield keys
        key = keys[-1]


def executed(rows: SqliteRows, statement: str) -> Repair:
    def mend() -> None:
        with rows.transaction() as connection:
            connection.execute(statement)

    return mend


# What no example shows is told as left over.
SHOWN = "SELECT DISTINCT sha256 FROM example_images JOIN examples USING (key)"
ANEW = "and add again, or restore the file from a copy"


def wrong_images(rows: SqliteRows) -> Iterator[Finding]:
    for (sha256,) in rows.read(f"{SHOWN} ORDER BY sha256"):
        with rows.snapshot():  # another process may be deleting it
            wrong = _wrong_image(rows, sha256)
        if wrong is not None:
            yield wrong, None


def _wrong_image(rows: SqliteRows, sha256: str) -> str | None:
    found = rows.read("SELECT CAST(data AS BLOB) FROM images WHERE sha256 = ?", sha256)
    if found and hashlib.sha256(found[0][0]).hexdigest() == sha256:
        return None
    wrong = f"image {sha256} is missing"
    if found:
        wrong = f"the bytes of image {sha256} are not those that were stored"
    showing = _showing(rows, sha256)
    return f"{wrong}; delete {showing} {ANEW}" if showing else None


def _showing(rows: SqliteRows, sha256: str) -> str:
    """All of them must go: what is added again does not replace the bytes that another shows."""
    found = rows.read(
        "SELECT DISTINCT id, namespace FROM example_images JOIN examples USING (key)"
        " WHERE sha256 = ? ORDER BY key",
        sha256,
    )
    named = [f"{id} of namespace {space!r}" if space else id for id, space in found]
    return f"example{'s' * (len(named) > 1)} {', '.join(named)}" if named else ""


def wrong_identities(rows: SqliteRows) -> Iterator[Finding]:
    for keys in paged_keys(rows):
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
        f"example {example.id} has another question, answer or image; delete it {ANEW}"
        for example in rows.by_keys(keys).values()
        if not is_itself(example)
    ]


EMBEDDED_AT_ONCE = 64
SAMPLED = 4
NAMED_AT_MOST = 3
# Of the vector's length. Between unit vectors it is a cosine of 0.999: batches of another size, or
# another machine, do not make the same numbers to the last bit.
ALIKE = 0.045


def wrong_views(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    """Without one that is complete nothing can be found, and nothing else would be missed."""
    if rows.views() or not rows.read("SELECT 1 FROM examples LIMIT 1"):
        return

    def mend() -> None:
        for name, view in views.items():
            reindex(rows, name, view, batch_size=EMBEDDED_AT_ONCE, progress=None)

    if views:
        yield "the examples have no vectors at all", mend
    else:
        yield "the examples have no vectors at all; repaired only with the embedder", None


def wrong_vectors(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    """Find vectors that are missing or damaged: wrong size, wrong checksum, or not comparable."""
    for stored in rows.views().values():
        wrong = [
            key
            for keys in paged_keys(rows)
            for key, vector in _whole_vectors(rows, keys, stored).items()
            if vector is None
        ]
        if not wrong:
            continue
        what = f"{len(wrong)} vectors {stored.name!r} are missing or damaged{_of(rows, wrong)}"
        view = views.get(stored.name)
        if view is not None:
            yield what, _embedding(rows, wrong, stored, view)
        else:
            yield f"{what}; repaired only with the embedder", None


def unlike_vectors(rows: SqliteRows, views: Mapping[str, View]) -> Iterator[Finding]:
    """Those that are whole, and not what the embedder makes of the example."""
    for name, stored in rows.views().items():
        view = views.get(name)
        if view is None:
            yield f"vectors {name!r} cannot be compared without their embedder", None
            continue
        try:
            _check_width(stored, view)
        except StoreError as error:
            yield str(error), None
            continue
        unlike: list[int] = []
        failed: list[BottegaError] = []
        for keys in paged_keys(rows, EMBEDDED_AT_ONCE):
            unlike += _unlike(rows, keys, stored, view, failed)
        if unlike:
            what = f"{len(unlike)} vectors {name!r} are not what the embedder makes"
            yield what + _of(rows, unlike), _embedding(rows, unlike, stored, view)
        if failed:
            yield f"{len(failed)} vectors {name!r} cannot be compared: {failed[0]}", None


def _of(rows: SqliteRows, keys: Sequence[int]) -> str:
    """Some of the examples, so that one may look at them."""
    found = rows.read(
        f"SELECT id FROM examples WHERE key IN {LISTED} ORDER BY key", listed(keys[:NAMED_AT_MOST])
    )
    more = f" and {len(keys) - NAMED_AT_MOST} more" if len(keys) > NAMED_AT_MOST else ""
    return f": of {', '.join(str(id) for (id,) in found)}{more}"


def makes(rows: SqliteRows, name: str, view: View) -> bool:
    """False if it makes none of the vectors that the first examples have: what a view reads of an
    example is in no file, and one may have been given the name of another."""
    keys = next(paged_keys(rows, SAMPLED), [])
    return not keys or len(_unlike(rows, keys, rows.views()[name], view, [])) < len(keys)


def _unlike(
    rows: SqliteRows,
    keys: Sequence[int],
    stored: StoredView,
    view: View,
    failed: list[BottegaError],
) -> list[int]:
    """What cannot be embedded is added to `failed`, and the others of its batch are compared."""
    try:
        examples = {
            # What is damaged is told elsewhere. A vector of it would be wrong, too.
            key: example
            for key, example in rows.by_keys(keys).items()
            if damage(example) is None
        }
        made = dict(zip(examples, view.vectors(list(examples.values())), strict=True))
    except BottegaError as error:
        if len(keys) == 1:
            failed.append(error)
            return []
        return [key for one in keys for key in _unlike(rows, [one], stored, view, failed)]
    held = _whole_vectors(rows, list(made), stored)
    return [
        key for key, vector in held.items() if vector is not None and not _alike(vector, made[key])
    ]


def _alike(stored: Vectors, made: Vectors) -> bool:
    return bool(np.linalg.norm(stored - made) <= ALIKE * np.linalg.norm(made))


def _whole_vectors(
    rows: SqliteRows, keys: list[int], view: StoredView
) -> dict[int, Vectors | None]:
    """Return the vector of each key, None if missing or damaged. Keys that another process has
    deleted since they were read are absent."""
    found = rows.read(
        "SELECT examples.key, CAST(vector AS BLOB), checksum FROM json_each(?1) AS chosen"
        " CROSS JOIN examples ON examples.key = chosen.value"
        " LEFT JOIN vectors ON vectors.key = examples.key AND view = ?2"
        " WHERE EXISTS (SELECT 1 FROM views WHERE number = ?2)",
        listed(keys),
        view.number,
    )
    return {key: _whole(blob, checksum, view.dimension) for key, blob, checksum in found}


def _whole(blob: bytes | None, checksum: int | None, dimension: int) -> Vectors | None:
    """Return the vector, or None if it is damaged. Without a checksum (format 6 and older) a vector
    of zeros counts as damaged, because an embedder rarely makes one."""
    if blob is None or len(blob) != 4 * dimension:
        return None
    if checksum is not None and zlib.crc32(blob) != checksum:
        return None
    vector = np.frombuffer(blob, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        length = np.vdot(vector, vector)  # not finite for NaN, infinite or too large numbers
    return vector if np.isfinite(length) and (length or checksum is not None) else None


def _embedding(rows: SqliteRows, keys: list[int], stored: StoredView, view: View) -> Repair:
    def mend() -> None:
        _check_width(stored, view)
        for start in range(0, len(keys), PAGE):
            embed_again(rows, keys[start : start + PAGE], stored.number, view)

    return mend


def _check_width(stored: StoredView, view: View) -> None:
    """Another embedder of the same fingerprint would damage what is sound."""
    check_widths({stored.name: stored}, {stored.name: view.embed.dimension})


log = logging.getLogger(__name__)

NO_EXAMPLE = "NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = {table}.key)"
NO_VIEW = "NOT EXISTS (SELECT 1 FROM views WHERE views.number = vectors.view)"
NO_USE = "NOT EXISTS (SELECT 1 FROM example_images AS e WHERE e.sha256 = images.sha256)"


@dataclass(frozen=True)
class Problem:
    """`repaired` only where it could be derived again; an image's bytes cannot."""

    what: str
    repaired: bool


@dataclass(frozen=True)
class VerificationReport:
    """What was looked at, in every namespace, and what was wrong with it."""

    examples: int
    images: int
    vectors: int
    snapshots: int
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return all(problem.repaired for problem in self.problems)


def verify(
    rows: SqliteRows, views: Mapping[str, View], *, deep: bool = False, repair: bool = False
) -> VerificationReport:
    """`deep` also embeds everything again and compares."""
    found = [
        (what, repair and mend is not None and _succeeds(mend))
        for what, mend in _findings(rows, views, deep)
    ]
    again = any(mended for _, mended in found)
    left = [what for what, _ in _findings(rows, views, deep)] if again else []
    problems = [Problem(what, mended and what not in left) for what, mended in found]
    known = {what for what, _ in found}
    problems += [Problem(what, repaired=False) for what in left if what not in known]
    examples, images, vectors = (
        int(rows.read(f"SELECT count(*) FROM {table}")[0][0])
        for table in ("examples", "images", "vectors")
    )
    snapshots = len(index_files(rows))
    return VerificationReport(examples, images, vectors, snapshots, tuple(problems))


def _findings(rows: SqliteRows, views: Mapping[str, View], deep: bool) -> Iterator[Finding]:
    """Each one is mended before what comes after it is looked at."""
    return chain(
        _pages(rows),
        _leftovers(rows),
        wrong_views(rows, views),
        wrong_images(rows),
        wrong_identities(rows),
        wrong_vectors(rows, views),
        unlike_vectors(rows, views) if deep else (),
        _log(rows),
        _index_files(rows),
    )


def _succeeds(mend: Repair) -> bool:
    """What one failure leaves as it was shall not keep the rest from being mended."""
    try:
        mend()
    except (BottegaError, OSError) as error:
        log.warning("not repaired: %s", error)
        return False
    return True


def _pages(rows: SqliteRows) -> Iterator[Finding]:
    for row in rows.read("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"SQLite: {row[0]}", None


def _leftovers(rows: SqliteRows) -> Iterator[Finding]:
    where = {table: NO_EXAMPLE.format(table=table) for table in ("vectors", "example_images")}
    where |= {"uses": NO_EXAMPLE.format(table="uses"), "images": NO_USE}
    for table, orphaned in where.items():
        ((number,),) = rows.read(f"SELECT count(*) FROM {table} WHERE {orphaned}")
        if number:
            mend = executed(rows, f"DELETE FROM {table} WHERE {orphaned}")
            yield f"{number} {table} of no example", mend
    ((number,),) = rows.read(f"SELECT count(*) FROM vectors WHERE {NO_VIEW}")
    if number:
        yield (
            f"{number} vectors of no view",
            executed(rows, f"DELETE FROM vectors WHERE {NO_VIEW}"),
        )


def _log(rows: SqliteRows) -> Iterator[Finding]:
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
            yield f"{number} rows whose {op} is not in the change log", executed(rows, statement)


def _index_files(rows: SqliteRows) -> Iterator[Finding]:
    for what, path in wrong_index_files(rows):
        yield what, partial(path.unlink, missing_ok=True) if path.is_file() else None
