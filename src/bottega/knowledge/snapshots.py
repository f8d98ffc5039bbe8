"""Search indexes saved beside the database, to open a large one quickly: graphs, or plain vectors
while there is no graph yet.

A file is what faiss writes, then the keys, a JSON head and a foot with a checksum. It is derived
and never believed without proof: whatever does not fit is as good as not there.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import stat
import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from bottega.knowledge.connection import MEMORY
from bottega.knowledge.slots import Keys

if TYPE_CHECKING:
    import faiss
else:
    from bottega.knowledge import lazy_faiss as faiss

log = logging.getLogger(__name__)

MAGIC = b"BttgHNSW"
BLOCK = 1 << 16
# Odd, so that no bit is lost, and each another, so that no two words can change places.
WEIGHTS = np.arange(1, BLOCK // 4, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
FOOT = struct.Struct("<QI8s")  # length of the head, checksum of all before the foot, magic


@dataclass(frozen=True)
class Head:
    """What the index was made from; `mark` is that of change `seq` (`RowStore.mark`)."""

    view: int
    fingerprint: str
    dimension: int
    metric: str
    namespace: str
    seq: int
    mark: int | None


@dataclass(frozen=True)
class Snapshot:
    head: Head
    index: faiss.Index
    keys: Keys


def snapshot_path(database: str, view: str, namespace: str) -> Path | None:
    """`K.db.VIEW.index`, with a hash of the namespace in it if there is one."""
    if database == MEMORY:
        return None
    space = f".{hashlib.sha256(namespace.encode()).hexdigest()[:12]}" if namespace else ""
    return Path(f"{database}.{view}{space}.index")


def unfinished_path(path: Path) -> Path:
    """Return the path of a partial graph that a process saved when it ended."""
    return path.with_name(f"{path.name}.unfinished")


def save(path: Path, found: Snapshot) -> bool:
    """Whether it could be written: a full disk or a read-only folder costs time, nothing else."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        faiss.write_index(found.index, str(part))
        head = orjson.dumps(asdict(found.head))
        with part.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(found.keys.astype("<i8").tobytes() + head)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
                checksum = checksum_of(written)
            file.write(FOOT.pack(len(head), checksum, MAGIC))
        part.replace(path)
    except (OSError, RuntimeError) as error:  # faiss raises RuntimeError where it cannot write
        log.warning("%s was not written, the next start will take longer: %s", path, error)
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True


def checksum_of(data: mmap.mmap | memoryview) -> int:
    """A CRC of the weighted sums of blocks: several times as quick as one of all bytes, and no bit,
    place of a word, block or end of a file can change without it."""
    words = np.frombuffer(data, np.uint8)
    whole = len(words) // BLOCK * BLOCK
    blocks = words[:whole].view(np.uint64).reshape(-1, len(WEIGHTS))
    sums = np.einsum("ij,j->i", blocks, WEIGHTS)  # as quick as a plain sum, unlike `@`
    return zlib.crc32(words[whole:].tobytes(), zlib.crc32(sums.tobytes()))


def load(path: Path) -> Snapshot | None:
    """None if there is none or it is damaged."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe may take for ever
            raise ValueError("it is not a regular file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = len(data) - FOOT.size
            head_size, checksum, magic = FOOT.unpack_from(data, max(end, 0))
            with memoryview(data) as whole, whole[:end] as body:
                if magic != MAGIC or checksum_of(body) != checksum:
                    raise ValueError("its checksum is wrong")
            head = Head(**orjson.loads(data[end - head_size : end]))
            index = faiss.read_index(str(path))
            start = end - head_size - 8 * index.ntotal
            keys = np.frombuffer(data[start : end - head_size], "<i8").astype(np.int64)
            # faiss opens the path by itself, where another process may have put a newer file.
            replaced = not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RuntimeError, struct.error) as error:
        log.warning("%s is left out and will be made again: %s", path, error)
        return None
    return load(path) if replaced else Snapshot(head, index, keys)
