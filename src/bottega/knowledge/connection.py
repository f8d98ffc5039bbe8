"""Opening the SQLite file of a knowledge base."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from bottega.errors import StoreError
from bottega.image import path_text

MEMORY = ":memory:"


def connect(path: str, *, create: bool, busy_seconds: float) -> sqlite3.Connection:
    """A connection that every thread may use, and whose commits wait for the disk.

    A file that may not be written opens for reading.
    """
    if path == MEMORY:
        return sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
    _check_path(Path(path), create)
    connection = sqlite3.connect(
        _uri(Path(path), create),
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_path(path: Path, create: bool) -> None:
    name = path_text(path)
    if "\0" in name:  # SQLite would create a file of the name before it
        raise StoreError(f"{name!r} is not a file name", hint="check the path")
    if path.is_dir():
        raise StoreError(f"{name} is a folder", hint="give the path of a file, such as kb.db")
    if not path.exists() and not create:
        raise StoreError(
            f"{name} does not exist", hint="check the path, or add examples to create it"
        )
    if not path.parent.is_dir():
        raise StoreError(
            f"the folder {path_text(path.parent)} does not exist", hint="create it first"
        )
    # To SQLite an empty file is a database in which nothing has been stored yet.
    if not create and path.stat().st_size == 0:
        raise StoreError(
            f"{name} is empty, not a knowledge base", hint="check the path, or delete the file"
        )


def _uri(path: Path, create: bool) -> str:
    query = "mode=rwc" if create else "mode=rw"
    if path.exists() and not os.access(path.parent, os.W_OK) and not _has_writer(path):
        query = "mode=ro&immutable=1"
    return f"file:{quote(os.fsencode(path.absolute()))}?{query}"


def _has_writer(path: Path) -> bool:
    """Whoever has the file open keeps a log and a shared-memory file beside it. Without the second
    one the log cannot be read where no file can be made."""
    wal, shared = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    if shared.exists() or not wal.exists():
        return wal.exists()
    if wal.stat().st_size > 0:
        raise StoreError(
            f"{path_text(path)} was not closed, and its folder may not be written",
            hint="open and close it once where the folder may be written: a copy needs"
            f" {path_text(wal.name)} too",
        )
    return False
