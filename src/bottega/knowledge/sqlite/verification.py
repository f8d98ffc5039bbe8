"""Verification of a file: pages, images, examples, change log and index files."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from bottega._util.progress import Stages, no_stages, plural
from bottega.errors import StoreError
from bottega.knowledge.index.index_files import IndexSnapshot, index_files, load
from bottega.knowledge.index.vector_index import MISSING
from bottega.knowledge.records import has_valid_id, unit
from bottega.knowledge.sqlite.writes import HORIZON
from bottega.knowledge.stores import ADD_AGAIN, Finding, Repair, StoreChecks, counted_pages
from bottega.protocols import Vectors

if TYPE_CHECKING:
    from bottega.knowledge.sqlite.rows import SqliteRows

# Images without an example are reported as orphans.
SHOWN = "SELECT DISTINCT sha256 FROM example_images JOIN examples USING (key)"
NO_EXAMPLE = "NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = {table}.key)"
NO_VIEW = "NOT EXISTS (SELECT 1 FROM views WHERE views.number = vectors.view)"
NO_USE = "NOT EXISTS (SELECT 1 FROM example_images AS e WHERE e.sha256 = images.sha256)"
PAGE = 256
ABANDONED_SECONDS = 3600


def file_checks(rows: SqliteRows, stages: Stages) -> StoreChecks:
    return StoreChecks(
        structure=_page_and_orphan_findings(rows),
        content=chain(find_damaged_images(rows, stages), find_wrong_ids(rows, stages)),
        derived=chain(
            _log_findings(rows),
            (
                (what, partial(path.unlink, missing_ok=True) if path.is_file() else None)
                for what, path in index_file_problems(rows)
            ),
        ),
        snapshots=len(_own_index_files(rows)),
    )


def statement_repair(rows: SqliteRows, statement: str) -> Repair:
    def fix() -> None:
        with rows.transaction() as connection:
            connection.execute(statement)

    return fix


def find_damaged_images(rows: SqliteRows, stages: Stages = no_stages) -> Iterator[Finding]:
    """Yield images whose bytes are missing or do not match their hash."""
    images = rows.read(f"{SHOWN} ORDER BY sha256")
    with stages("checking images", len(images)) as step:
        for (sha256,) in images:
            with rows.snapshot():  # another process may delete it
                wrong = _wrong_image(rows, sha256)
            if wrong is not None:
                yield wrong, None
            step(1)


def _wrong_image(rows: SqliteRows, sha256: str) -> str | None:
    found = rows.read("SELECT CAST(data AS BLOB) FROM images WHERE sha256 = ?", sha256)
    if found and hashlib.sha256(found[0][0]).hexdigest() == sha256:
        return None
    wrong = f"image {sha256} is missing"
    if found:
        wrong = f"the bytes of image {sha256} are not those that were stored"
    # All of them must be deleted: adding one again does not replace bytes that another one uses.
    owners = rows.read(
        "SELECT DISTINCT id, namespace FROM example_images JOIN examples USING (key)"
        " WHERE sha256 = ? ORDER BY key",
        sha256,
    )
    if not owners:
        return None
    named = [f"{id} of namespace {space!r}" if space else id for id, space in owners]
    return f"{wrong}; delete example{'s' * (len(named) > 1)} {', '.join(named)} {ADD_AGAIN}"


def find_wrong_ids(rows: SqliteRows, stages: Stages) -> Iterator[Finding]:
    """Yield examples that cannot be read or whose content does not match their id."""
    for keys in counted_pages(rows, "checking examples", stages):
        try:
            for wrong in _wrong_ids(rows, keys):
                yield wrong, None
        except StoreError:  # one of the rows cannot be read
            for key in keys:
                try:
                    for wrong in _wrong_ids(rows, [key]):
                        yield wrong, None
                except StoreError as error:
                    yield f"row {key} cannot be read: {error}", None


def _wrong_ids(rows: SqliteRows, keys: list[int]) -> list[str]:
    return [
        f"example {example.id} has another question, answer or image; delete it {ADD_AGAIN}"
        for example in rows.by_keys(keys).values()
        if not has_valid_id(example)
    ]


def _page_and_orphan_findings(rows: SqliteRows) -> Iterator[Finding]:
    for row in rows.read("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"SQLite: {row[0]}", None
    owned = ("vectors", "example_images", "uses")
    orphans = [(table, "example", NO_EXAMPLE.format(table=table)) for table in owned]
    orphans += [("images", "example", NO_USE), ("vectors", "view", NO_VIEW)]
    for table, owner, orphaned in orphans:
        ((number,),) = rows.read(f"SELECT count(*) FROM {table} WHERE {orphaned}")
        if number:
            fix = statement_repair(rows, f"DELETE FROM {table} WHERE {orphaned}")
            yield f"{plural(number, table.removesuffix('s'))} of no {owner}", fix


def _log_findings(rows: SqliteRows) -> Iterator[Finding]:
    """Yield differences between the rows and the result of replaying the change log."""
    unlogged = (
        "FROM examples WHERE coalesce((SELECT op FROM changes WHERE changes.key = examples.key"
        " ORDER BY seq DESC LIMIT 1), 'delete') != 'put'"
    )
    last = "SELECT key, max(seq) AS seq FROM changes WHERE key > 0 GROUP BY key"
    remaining = (
        f"FROM ({last}) AS last JOIN changes USING (seq) WHERE changes.op = 'put'"
        " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)"
    )
    for op, source, chosen in (("put", "examples", unlogged), ("delete", "changes", remaining)):
        ((number,),) = rows.read(f"SELECT count(*) {chosen}")
        if number:
            statement = (
                "INSERT INTO changes (op, key, id, namespace)"
                f" SELECT '{op}', {source}.key, {source}.id, {source}.namespace {chosen}"
            )
            yield (
                f"{plural(number, 'row')} whose {op} is not in the change log",
                statement_repair(rows, statement),
            )


def index_file_problems(rows: SqliteRows) -> Iterator[tuple[str, Path]]:
    """Yield a description and the path of every wrong index file. Regular files may be deleted."""
    for path in _own_index_files(rows):
        if path.exists() and not path.is_file():
            yield f"{path.name} is not a file; move it away", path
        elif path.suffix == ".part":
            # Another process may still be writing a newer one.
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    yield f"{path.name} is incomplete", path
        else:
            found = load(path)
            try:
                # Without a snapshot: another process may have removed the file.
                fits = not path.exists() if found is None else _matches_rows(rows, found)
            except StoreError:  # an unreadable vector, which another check reports
                fits = False
            if not fits:
                yield f"{path.name} does not match the rows", path


def _own_index_files(rows: SqliteRows) -> list[Path]:
    """Return the index files of all views, also of unfinished ones."""
    return index_files(rows.path, [row[0] for row in rows.read("SELECT DISTINCT name FROM views")])


def _matches_rows(rows: SqliteRows, found: IndexSnapshot) -> bool:
    header = found.header
    # One snapshot: another process's pruning in between would look like damage.
    with rows.snapshot():
        mark = rows.mark(header.seq)
        if mark is None and header.seq <= rows.read(HORIZON)[0][0]:  # too old, but not wrong
            return True
    if mark is None or mark != header.mark:
        return False
    stored = {view.number: view for view in rows.views().values()}.get(header.view)
    if stored is None:  # its view was rebuilt under another number
        return True
    if stored.fingerprint != header.fingerprint:
        return False
    slots = np.flatnonzero(found.keys != MISSING)
    for start in range(0, len(slots), PAGE):
        chosen = slots[start : start + PAGE]
        vectors = rows.vectors(found.keys[chosen].tolist(), header.view)
        for slot in chosen.tolist():
            row = vectors.get(int(found.keys[slot]))  # None: deleted since
            indexed = cast(Vectors, found.index.reconstruct(slot))
            if row is None:
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # the stored one may be damaged
                scaled = unit(row[None])[0] if header.metric == "cosine" else row
            if not np.array_equal(indexed, scaled):
                return False
    return True
