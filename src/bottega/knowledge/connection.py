"""Opening SQLite, and the one place where its errors become ours."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from bottega.errors import StoreBusyError, StoreError, StoreFullError

MEMORY = ":memory:"
PRIMARY_CODE = 0xFF


@contextmanager
def translated(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translation(error, name) from error
    except OSError as error:
        raise StoreError(
            f"{name} cannot be opened: {error.strerror}", hint="check the path"
        ) from error


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
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _check_path(path: Path, create: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder", hint="give the path of a file, such as kb.db")
    if not path.exists() and not create:
        raise StoreError(
            f"{path} does not exist", hint="check the path, or add examples to create it"
        )
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist", hint="create it first")


def _uri(path: Path, create: bool) -> str:
    query = "mode=rwc" if create else "mode=rw"
    wal = path.with_name(path.name + "-wal")
    if path.exists() and not os.access(path.parent, os.W_OK) and not wal.exists():
        # WAL readers need a shared-memory file beside the database. Where none can be made
        # nobody can be writing either.
        query = "mode=ro&immutable=1"
    return f"file:{quote(str(path.absolute()))}?{query}"


def _translation(error: sqlite3.Error, name: str) -> StoreError:
    # Errors of the Python module itself, such as a closed connection, carry no code.
    code = getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusyError(
                f"another process has been writing to {name} for too long",
                hint="try again when it has finished",
            )
        case sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"there is no space left for {name}",
                hint="free some space and add the rest again; what was stored is intact",
            )
        case sqlite3.SQLITE_NOTADB:
            return StoreError(
                f"{name} is not a knowledge base",
                hint="check the path, or choose a new file name",
            )
        case sqlite3.SQLITE_READONLY:
            return StoreError(
                f"{name} may only be read", hint="change its permissions, or write to a copy"
            )
        case sqlite3.SQLITE_CORRUPT:
            return StoreError(
                f"{name} is damaged: {error}", hint="restore it from a copy, or build it again"
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StoreError(
                f"{name} cannot be opened", hint="check its permissions and its folder's"
            )
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
        return StoreError(f"{name} is closed", hint="open it again")
    return StoreError(f"{name} failed: {error}", hint="check the disk and the file")
