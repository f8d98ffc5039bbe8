"""Vectors against rows, and against what their embedders make."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bottega.errors import BottegaError, StoreError
from bottega.knowledge.database import LISTED, listed
from bottega.knowledge.findings import PAGE, Finding, Repair, paged_keys
from bottega.knowledge.ports import StoredView
from bottega.knowledge.records import damage
from bottega.knowledge.reindexing import embed_again, reindex
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.views import View
from bottega.knowledge.writing import check_widths
from bottega.protocols import Vectors

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
