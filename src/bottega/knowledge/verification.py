"""Verification and repair of a knowledge base file: images, examples, vectors and index files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from bottega._util.progress import Stages, no_stages, plural
from bottega.errors import BottegaError, StoreError
from bottega.knowledge.batch import embed_again, reindex
from bottega.knowledge.index.index_files import index_file_problems, index_files
from bottega.knowledge.records import StoredView, View, check_dimensions, find_damage, has_valid_id
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.stores import RowStore

Repair = Callable[[], None]
# Description of a problem, and its repair if there is one.
Finding = tuple[str, Repair | None]

PAGE = 256


def paged_keys(rows: RowStore, size: int = PAGE) -> Iterator[list[int]]:
    """Yield pages of keys, in all namespaces."""
    key = 0
    while keys := rows.all_keys(key, size):
        yield keys
        key = keys[-1]


def _counted_pages(
    rows: RowStore, title: str, stages: Stages, size: int = PAGE
) -> Iterator[list[int]]:
    """Yield pages of keys as one stage of the verification."""
    with stages(title, rows.sizes()[0]) as step:
        for keys in paged_keys(rows, size):
            yield keys
            step(len(keys))


def statement_repair(rows: SqliteRows, statement: str) -> Repair:
    def fix() -> None:
        with rows.transaction() as connection:
            connection.execute(statement)

    return fix


# Images without an example are reported as orphans.
SHOWN = "SELECT DISTINCT sha256 FROM example_images JOIN examples USING (key)"
ADD_AGAIN = "and add again, or restore the file from a copy"


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
    for keys in _counted_pages(rows, "checking examples", stages):
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


def find_damaged_examples(rows: RowStore, stages: Stages) -> Iterator[Finding]:
    """Yield examples whose images or content do not match their hashes."""
    for keys in _counted_pages(rows, "checking examples", stages):
        for example in rows.by_keys(keys).values():
            if (damage := find_damage(example)) is not None:
                yield f"example {example.id}: {damage}; delete it {ADD_AGAIN}", None


def _wrong_ids(rows: SqliteRows, keys: list[int]) -> list[str]:
    return [
        f"example {example.id} has another question, answer or image; delete it {ADD_AGAIN}"
        for example in rows.by_keys(keys).values()
        if not has_valid_id(example)
    ]


EMBED_BATCH = 64
SAMPLE = 4
MAX_NAMED = 3
# Relative to the vector's length; a cosine of 0.999 between unit vectors. Another batch size or
# machine does not reproduce the last bits.
TOLERANCE = 0.045


def find_missing_views(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield a problem if there are examples but no complete view. Other checks would not notice."""
    if rows.views() or not rows.all_keys(0, 1):
        return

    def fix() -> None:
        for name, view in views.items():
            with stages("embedding", rows.sizes()[0]) as step:
                reindex(rows, name, view, batch_size=EMBED_BATCH, progress=step)

    if views:
        yield "the examples have no vectors at all", fix
    else:
        yield "the examples have no vectors at all; repaired only with the embedder", None


def find_damaged_vectors(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield vectors that are missing or damaged: wrong size, wrong checksum, or not finite."""
    for stored in rows.views().values():
        wrong = [
            key
            for keys in _counted_pages(rows, "checking vectors", stages)
            for key, vector in rows.checked_vectors(keys, stored).items()
            if vector is None
        ]
        if not wrong:
            continue
        what = f"{plural(len(wrong), 'vector')} {stored.name!r} missing or damaged"
        what += _example_names(rows, wrong)
        view = views.get(stored.name)
        if view is not None:
            yield what, _embedding_repair(rows, wrong, stored, view, stages)
        else:
            yield f"{what}; repaired only with the embedder", None


def find_mismatched_vectors(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield valid vectors that differ from the embedder's output."""
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
        mismatched: list[int] = []
        failed: list[BottegaError] = []
        for keys in _counted_pages(rows, "embedding again", stages, EMBED_BATCH):
            mismatched += _mismatched_keys(rows, keys, stored, view, failed)
        if mismatched:
            what = f"{plural(len(mismatched), 'vector')} {name!r} unlike those of the embedder"
            yield (
                what + _example_names(rows, mismatched),
                _embedding_repair(rows, mismatched, stored, view, stages),
            )
        if failed:
            yield f"{plural(len(failed), 'vector')} {name!r} not comparable: {failed[0]}", None


def _example_names(rows: RowStore, keys: Sequence[int]) -> str:
    """Return the ids of the first examples, for messages."""
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return f": of {', '.join(rows.ids_of(keys[:MAX_NAMED]))}{more}"


def makes_vectors(rows: RowStore, name: str, view: View) -> bool:
    """Return whether the view reproduces any vector among the first examples.

    The file does not record a view's `to_query`, and a different view may have the same name.
    """
    keys = next(paged_keys(rows, SAMPLE), [])
    return not keys or len(_mismatched_keys(rows, keys, rows.views()[name], view, [])) < len(keys)


def _mismatched_keys(
    rows: RowStore,
    keys: Sequence[int],
    stored: StoredView,
    view: View,
    failed: list[BottegaError],
) -> list[int]:
    """Return the keys whose vectors differ from the embedder's output. Errors go to `failed`, and
    the rest of the batch is compared."""
    try:
        examples = {
            # Another check reports damaged examples, whose vectors would be wrong too.
            key: example
            for key, example in rows.by_keys(keys).items()
            if find_damage(example) is None
        }
        made = dict(zip(examples, view.vectors(list(examples.values())), strict=True))
    except BottegaError as error:
        if len(keys) == 1:
            failed.append(error)
            return []
        return [key for one in keys for key in _mismatched_keys(rows, [one], stored, view, failed)]
    stored_vectors = rows.checked_vectors(list(made), stored)
    return [
        key
        for key, vector in stored_vectors.items()
        if vector is not None
        and np.linalg.norm(vector - made[key]) > TOLERANCE * np.linalg.norm(made[key])
    ]


def _embedding_repair(
    rows: RowStore, keys: list[int], stored: StoredView, view: View, stages: Stages
) -> Repair:
    def fix() -> None:
        _check_width(stored, view)
        with stages("repairing vectors", len(keys)) as step:
            for start in range(0, len(keys), PAGE):
                page = keys[start : start + PAGE]
                embed_again(rows, page, stored.number, view)
                step(len(page))

    return fix


def _check_width(stored: StoredView, view: View) -> None:
    """Raise `StoreError` if the dimension differs: an embedder with the same fingerprint but other
    vectors would damage valid rows."""
    check_dimensions({stored.name: stored}, {stored.name: view.embed.dimension})


log = logging.getLogger(__name__)

NO_EXAMPLE = "NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = {table}.key)"
NO_VIEW = "NOT EXISTS (SELECT 1 FROM views WHERE views.number = vectors.view)"
NO_USE = "NOT EXISTS (SELECT 1 FROM example_images AS e WHERE e.sha256 = images.sha256)"


@dataclass(frozen=True)
class Problem:
    """Problem in a file. `repaired` is possible for derived data only, not for the bytes of an
    image."""

    what: str
    repaired: bool


@dataclass(frozen=True)
class VerificationReport:
    """Numbers of parts checked in all namespaces, and the problems found."""

    examples: int
    images: int
    vectors: int
    snapshots: int
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return all(problem.repaired for problem in self.problems)


def verify(
    rows: RowStore, views: Mapping[str, View], *, deep: bool, repair: bool, stages: Stages
) -> VerificationReport:
    """Check the file; `deep` also embeds every example again and compares, `repair` rebuilds
    derived data."""
    found = [
        (what, repair and fix is not None and _run_repair(fix))
        for what, fix in _findings(rows, views, deep, stages)
    ]
    again = any(fixed for _, fixed in found)
    remaining = [what for what, _ in _findings(rows, views, deep, stages)] if again else []
    problems = [Problem(what, fixed and what not in remaining) for what, fixed in found]
    already_found = {what for what, _ in found}
    problems += [Problem(what, repaired=False) for what in remaining if what not in already_found]
    snapshots = len(index_files(rows)) if isinstance(rows, SqliteRows) else 0
    return VerificationReport(*rows.sizes(), snapshots, tuple(problems))


def _findings(
    rows: RowStore, views: Mapping[str, View], deep: bool, stages: Stages
) -> Iterator[Finding]:
    """Yield problems in order; each is repaired before the next check runs."""
    if not isinstance(rows, SqliteRows):  # the server checks its own pages and indexes
        return chain(
            find_missing_views(rows, views, stages),
            find_damaged_examples(rows, stages),
            find_damaged_vectors(rows, views, stages),
            find_mismatched_vectors(rows, views, stages) if deep else (),
        )
    return chain(
        _page_and_orphan_findings(rows),
        find_missing_views(rows, views, stages),
        find_damaged_images(rows, stages),
        find_wrong_ids(rows, stages),
        find_damaged_vectors(rows, views, stages),
        find_mismatched_vectors(rows, views, stages) if deep else (),
        _log_findings(rows),
        (
            (what, partial(path.unlink, missing_ok=True) if path.is_file() else None)
            for what, path in index_file_problems(rows)
        ),
    )


def _run_repair(fix: Repair) -> bool:
    """Run a repair and return whether it succeeded. A failure does not stop the other repairs."""
    try:
        fix()
    except (BottegaError, OSError) as error:
        log.warning("not repaired: %s", error)
        return False
    return True


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
