"""The files under a store of passages. Rows are named by whole lines of entries and by nothing
else: who reads changes nothing, and who builds is alone and writes over what a killed one left."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bottega.errors import StoreBusyError, StoreError, StoreFullError

MANIFEST, ROWS, ENTRIES, LOCK = "manifest.json", "rows.bin", "entries.jsonl", "lock"
BEGUN = frozenset((LOCK, f"{MANIFEST}.new"))  # all that a store may hold without a manifest
ANEW = "delete the folder, and build anew"


class Entry(NamedTuple):
    """`check` is of the row's bytes and of the rest, so that no row passes for another's."""

    row: int
    id: str
    mark: str
    check: int

    @classmethod
    def of(cls, row: int, id: str, mark: str, data: bytes) -> Entry:
        return cls(
            row, id, mark, zlib.crc32(data, zlib.crc32(json.dumps([row, id, mark]).encode()))
        )

    def holds(self, data: bytes) -> bool:
        return self == Entry.of(self.row, self.id, self.mark, data)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """What the system refuses, as a `StoreError`."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be read or written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(
                reason, hint="make room; what is there is kept, and the same command does the rest"
            ) from error
        raise StoreError(reason, hint="check that it is a folder, and your rights in it") from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises `StoreError` if another process, or another store in this one, is
    building there."""
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with storing(folder):
            _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def check_own(folder: Path) -> None:
    """Raises `StoreError` for a folder that is there and holds another program's files."""
    with storing(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if MANIFEST not in names and names - BEGUN:
        raise StoreError(
            f"{folder} holds files that are not a store's", hint="give an empty folder"
        )


def write(path: Path, data: bytes, *, at: int = 0) -> None:
    """From byte `at`, over whatever an interrupted write left there."""
    with storing(path.parent), path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """As a whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    write(new, data)
    with storing(path.parent):
        new.replace(path)


def read_entries(folder: Path, *, start: int, row: int) -> tuple[list[Entry], int]:
    """Those that begin at byte `start` with the entry of `row`, and the byte behind them. A line
    without its end is one that is being written, or never was."""
    path = folder / ENTRIES
    data = b""
    with storing(folder):
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(start - 1, 0))
                data = file.read()
    if start and data[:1] != b"\n":
        raise damaged(path)
    lines = data[bool(start) : data.rfind(b"\n") + 1]
    entries = [_entry(line, path) for line in lines.splitlines()]
    if any(entry.row != place for place, entry in enumerate(entries, row)):
        raise damaged(path)
    return entries, start + len(lines)


def check_rows(folder: Path, *, count: int, size: int) -> None:
    """Raises `StoreError` where the file is shorter than the rows that entries name."""
    path = folder / ROWS
    with storing(folder):
        found = path.stat().st_size if path.exists() else None
    if count and (found is None or found < count * size):
        raise StoreError(f"{path} is {'missing' if found is None else 'too short'}", hint=ANEW)


def read_rows(folder: Path, entries: Sequence[Entry], size: int) -> bytes:
    """One behind the other. Read and not mapped: a mapped file that another program cuts kills the
    process."""
    path, rows = folder / ROWS, []
    if not entries:
        return b""
    check_rows(folder, count=1 + max(entry.row for entry in entries), size=size)
    with storing(folder), path.open("rb") as file:
        for entry in entries:
            file.seek(entry.row * size)
            rows.append(file.read(size))
    for entry, row in zip(entries, rows, strict=True):
        if not entry.holds(row):
            raise StoreError(f"{path} holds another row for passage {entry.id}", hint=ANEW)
    return b"".join(rows)


def damaged(path: Path) -> StoreError:
    return StoreError(f"{path} is damaged", hint=ANEW)


def _entry(line: bytes, path: Path) -> Entry:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    match found:
        case [int(row), str(id), str(mark), int(check)]:
            return Entry(row, id, mark, check)
    raise damaged(path)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two builders at once are the user's affair
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreBusyError(
            f"passages are being compressed into {folder} already",
            hint="wait until that is done, or name another folder",
        ) from error
