"""Whether a file is what it should be: images against hashes, vectors and indexes against rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from bottega.errors import BottegaError
from bottega.knowledge.findings import Finding, Repair, executed
from bottega.knowledge.index_files import index_files, wrong_index_files
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.verifying_examples import wrong_identities, wrong_images
from bottega.knowledge.verifying_vectors import (
    unlike_vectors,
    wrong_vectors,
    wrong_views,
)
from bottega.knowledge.views import View

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


def verify(
    rows: SqliteRows, views: Mapping[str, View], *, deep: bool = False, repair: bool = False
) -> Verified:
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
    return Verified(examples, images, vectors, snapshots, tuple(problems))


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
