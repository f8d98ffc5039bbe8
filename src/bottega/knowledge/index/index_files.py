"""Index files beside a database: names, format, and checks against the rows."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import orjson

from bottega._util.sqlite import MEMORY
from bottega.errors import StoreError
from bottega.knowledge.eviction import HORIZON
from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.index.vector_index import MISSING, Keys
from bottega.knowledge.records import unit
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.protocols import Vectors

log = logging.getLogger(__name__)

MAGIC = b"BttgHNSW"
BLOCK = 1 << 16
# Odd weights lose no bit; different weights detect swapped words.
WEIGHTS = np.arange(1, BLOCK // 4, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
FOOT = struct.Struct("<QI8s")  # header length, checksum of everything before the foot, magic


@dataclass(frozen=True)
class SnapshotHeader:
    """Origin of a saved index; `mark` is that of change `seq` (`Database.mark`)."""

    view: int
    fingerprint: str
    dimension: int
    metric: str
    namespace: str
    seq: int
    mark: int | None


@dataclass(frozen=True)
class IndexSnapshot:
    """Saved faiss index with its header and the key of each slot."""

    header: SnapshotHeader
    index: faiss.Index
    keys: Keys


def snapshot_path(database: str, view: str, namespace: str) -> Path | None:
    """Return `K.db.VIEW.index`, with a hash of the namespace if there is one; None for
    `:memory:`."""
    if database == MEMORY:
        return None
    space = f".{hashlib.sha256(namespace.encode()).hexdigest()[:12]}" if namespace else ""
    return Path(f"{database}.{view}{space}.index")


def unfinished_path(path: Path) -> Path:
    """Return the path of a partial graph that a process saved when it ended."""
    return path.with_name(f"{path.name}.unfinished")


def save(path: Path, found: IndexSnapshot) -> bool:
    """Write a snapshot and return whether it succeeded. A full disk or a read-only folder only
    makes the next start slower."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        faiss.write_index(found.index, str(part))
        header = orjson.dumps(asdict(found.header))
        with part.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(found.keys.astype("<i8").tobytes() + header)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
                checksum = checksum_of(written)
            file.write(FOOT.pack(len(header), checksum, MAGIC))
        part.replace(path)
    except (OSError, RuntimeError) as error:  # faiss raises RuntimeError on write errors
        log.warning("%s was not written; the next start will take longer: %s", path, error)
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True


def checksum_of(data: mmap.mmap | memoryview) -> int:
    """Return a CRC over weighted sums of blocks.

    It is several times faster than a CRC over all bytes, and still changes with any bit and with
    the order of words or blocks.
    """
    words = np.frombuffer(data, np.uint8)
    whole = len(words) // BLOCK * BLOCK
    blocks = words[:whole].view(np.uint64).reshape(-1, len(WEIGHTS))
    sums = np.einsum("ij,j->i", blocks, WEIGHTS)  # as fast as a plain sum, unlike `@`
    return zlib.crc32(words[whole:].tobytes(), zlib.crc32(sums.tobytes()))


def load(path: Path) -> IndexSnapshot | None:
    """Return the snapshot, or None if it is missing or damaged."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may block forever
            raise ValueError("it is not a regular file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = len(data) - FOOT.size
            header_size, checksum, magic = FOOT.unpack_from(data, max(end, 0))
            with memoryview(data) as whole, whole[:end] as body:
                if magic != MAGIC or checksum_of(body) != checksum:
                    raise ValueError("its checksum is wrong")
            header = SnapshotHeader(**orjson.loads(data[end - header_size : end]))
            index = faiss.read_index(str(path))
            start = end - header_size - 8 * index.ntotal
            keys = np.frombuffer(data[start : end - header_size], "<i8").astype(np.int64)
            # faiss opens the path itself: another process may have replaced the file.
            replaced = not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RuntimeError, struct.error) as error:
        log.warning("%s is ignored and will be rebuilt: %s", path, error)
        return None
    return load(path) if replaced else IndexSnapshot(header, index, keys)


PAGE = 256
ABANDONED_SECONDS = 3600


def index_file_problems(rows: SqliteRows) -> Iterator[tuple[str, Path]]:
    """Yield a description and the path of every wrong index file. Regular files may be deleted."""
    for path in index_files(rows):
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


def delete_index_files(rows: SqliteRows, view: str) -> None:
    """Delete the index files of a view, in all namespaces."""
    for path in index_files(rows, view):
        with suppress(OSError):
            path.unlink()


def index_files(rows: SqliteRows, view: str | None = None) -> list[Path]:
    """Return the files beside the database whose names match an index of this view, by default of
    any of its views."""
    if rows.path == MEMORY:
        return []
    path = Path(rows.path)
    stored = [row[0] for row in rows.read("SELECT DISTINCT name FROM views")]
    views = "|".join(map(re.escape, stored if view is None else [view]))
    # Other files beside the database belong to the user.
    ours = re.compile(
        rf"{re.escape(path.name)}\.({views})(\.[0-9a-f]{{12}})?"
        r"(\.index(\.unfinished)?|\.part|\.index(\.unfinished)?\.[0-9]+-[0-9]+\.part)"
    )
    return sorted(each for each in path.parent.iterdir() if ours.fullmatch(each.name))


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
