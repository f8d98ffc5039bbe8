"""Index files beside a database: names and format."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson

from bottega._util.sqlite import MEMORY
from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.index.vector_index import Keys

log = logging.getLogger(__name__)

MAGIC = b"BttgHNSW"
BLOCK = 1 << 16
# Odd weights lose no bit; different weights detect swapped words.
WEIGHTS = np.arange(1, BLOCK // 4, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
FOOT = struct.Struct("<QI8s")  # header length, checksum of everything before the foot, magic


@dataclass(frozen=True)
class SnapshotHeader:
    """Origin of a saved index; `mark` is the random number of change `seq` (`SqliteRows.mark`)."""

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


def index_files(database: str, views: Iterable[str]) -> list[Path]:
    """Return the files beside the database whose names match an index of these views, in any
    namespace."""
    if database == MEMORY:
        return []
    path = Path(database)
    names = "|".join(map(re.escape, views))
    # Other files beside the database belong to the user.
    ours = re.compile(
        rf"{re.escape(path.name)}\.({names})(\.[0-9a-f]{{12}})?"
        r"(\.index(\.unfinished)?|\.part|\.index(\.unfinished)?\.[0-9]+-[0-9]+\.part)"
    )
    return sorted(each for each in path.parent.iterdir() if ours.fullmatch(each.name))
