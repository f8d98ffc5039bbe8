"""The index files beside a database: which they are, and whether each agrees with the rows."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np

from bottega.errors import StoreError
from bottega.knowledge.connection import MEMORY
from bottega.knowledge.index import Metric
from bottega.knowledge.pruning import HORIZON
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.slots import NOWHERE
from bottega.knowledge.snapshots import Snapshot, load
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors

PAGE = 256
LEFT_OVER_SECONDS = 3600


def wrong_index_files(rows: SqliteRows) -> Iterator[tuple[str, Path]]:
    """What is wrong with each; the file can go, if it is one."""
    for path in index_files(rows):
        if path.exists() and not path.is_file():
            yield f"{path.name} should be a file; move it away", path
        elif path.suffix == ".part":
            if _is_left_over(path):
                yield f"{path.name} was never finished", path
        elif not _fits(rows, path):
            yield f"{path.name} does not fit the rows", path


def index_files(rows: SqliteRows) -> list[Path]:
    if rows.path == MEMORY:
        return []
    path = Path(rows.path)
    views = "|".join(re.escape(row[0]) for row in rows.read("SELECT DISTINCT name FROM views"))
    # What people keep beside it is theirs.
    ours = re.compile(
        rf"{re.escape(path.name)}\.({views})(\.[0-9a-f]{{12}})?"
        r"(\.index(\.unfinished)?|\.part|\.index(\.unfinished)?\.[0-9]+-[0-9]+\.part)"
    )
    return sorted(each for each in path.parent.iterdir() if ours.fullmatch(each.name))


def _is_left_over(path: Path) -> bool:
    """Another process may be writing it at this moment, or have just finished."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS
    return False


def _fits(rows: SqliteRows, path: Path) -> bool:
    found = load(path)
    try:
        if found is None:
            return not path.exists()  # another process may have removed it
        return _agrees(rows, found)
    except StoreError:  # a vector that cannot be read, which is told elsewhere
        return False


def _agrees(rows: SqliteRows, found: Snapshot) -> bool:
    head = found.head
    # In one moment, or another process's pruning in between would look like damage.
    with rows.snapshot():
        mark = rows.mark(head.seq)
        if mark is None and head.seq <= rows.read(HORIZON)[0][0]:  # not wrong, only too old
            return True
    if mark is None or mark != head.mark:
        return False
    stored = {view.number: view for view in rows.views().values()}.get(head.view)
    if stored is None:  # its view was made anew, which gives it another number
        return True
    if stored.fingerprint != head.fingerprint:
        return False
    metric: Metric = "l2" if head.metric == "l2" else "cosine"
    slots = np.flatnonzero(found.keys != NOWHERE)
    for start in range(0, len(slots), PAGE):
        chosen = slots[start : start + PAGE]
        vectors = rows.vectors(found.keys[chosen].tolist(), head.view)
        for slot in chosen.tolist():
            row = vectors.get(int(found.keys[slot]))  # None: deleted since
            indexed = cast(Vectors, found.index.reconstruct(slot))
            if row is not None and not _same(indexed, row, metric):
                return False
    return True


def _same(indexed: Vectors, stored: Vectors, metric: Metric) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # the stored vector may be damaged
        return np.array_equal(indexed, unit(stored[None])[0] if metric == "cosine" else stored)
