"""Files of a token array: appended to, checked on opening, replaced as a whole or not at all."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 22
LOCK = "lock"


def append(path: Path, content: bytes, *, at: int, crc: int) -> int:
    """Writes from byte `at`, over whatever an interrupted append left there; the new checksum."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(content, crc)


def checksum(path: Path, size: int) -> int | None:
    """Of the first `size` bytes; None if there are not as many."""
    if not path.is_file() or path.stat().st_size < size:
        return None
    crc = 0
    with path.open("rb") as file:
        while size > 0:
            chunk = file.read(min(CHUNK, size))
            crc = zlib.crc32(chunk, crc)
            size -= len(chunk)
    return crc


def mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Read-only; an empty file cannot be mapped and needs not be."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, mode="r", shape=shape)


def lock(folder: Path) -> int | None:
    """A file descriptor that holds the folder until it is closed; None if another has it."""
    with suppress(ModuleNotFoundError):  # where there is no fcntl, the user sees to it
        import fcntl

        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
