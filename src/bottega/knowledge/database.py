"""SQLite file of a knowledge base: opening, connections, statements and closing."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Self

import orjson

from bottega._util import sqlite
from bottega._util.sqlite import MEMORY
from bottega.errors import SettingError, StoreError
from bottega.image import path_text
from bottega.knowledge.records import Value
from bottega.knowledge.schema import KNOWLEDGE_BASE


def connect(path: str, *, create: bool, busy_seconds: float) -> sqlite3.Connection:
    """Open a connection whose commits wait for the disk."""
    if path != MEMORY:
        _check_path(Path(path), create)
    return sqlite.connect(path, create=create, busy_seconds=busy_seconds, synchronous="FULL")


def _check_path(path: Path, create: bool) -> None:
    name = path_text(path)
    if "\0" in name:  # SQLite would cut the name at the NUL
        raise StoreError(f"the file name contains a NUL, got {name!r}", hint="check the path")
    if path.is_dir():
        raise StoreError(
            f"{name} is a folder, not a file", hint="give the path of a file, such as kb.db"
        )
    if not path.exists() and not create:
        raise StoreError(
            f"{name} does not exist", hint="check the path, or add examples to create it"
        )
    if not path.parent.is_dir():
        raise StoreError(
            f"the folder {path_text(path.parent)} does not exist", hint="create it first"
        )
    # SQLite accepts an empty file as a new database.
    if not create and path.stat().st_size == 0:
        raise StoreError(
            f"{name} is empty, not a knowledge base", hint="check the path, or delete the file"
        )


# SQL for a list of any length as one JSON parameter.
NUL = "\\u0000"
IN_JSON = "(SELECT value FROM json_each(?))"


class Database:
    """Connections to a file: one reads and one writes, so readers do not wait for a writer's
    disk."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = 10.0) -> None:
        # Absolute: the working folder may change, and index files are beside the database.
        self.path = path if path == MEMORY else str(Path(path).absolute())
        self.name = "the knowledge base in memory" if path == MEMORY else path_text(path)
        with KNOWLEDGE_BASE.translated(self.name):
            self._writer = connect(path, create=create, busy_seconds=busy_seconds)
            self._reader = self._writer
            self._writing = self._reading = RLock()
            try:
                KNOWLEDGE_BASE.migrate(self._writer, self.name)
                if path != MEMORY:
                    self._reader = connect(path, create=False, busy_seconds=busy_seconds)
                    self._reading = RLock()
            except BaseException:
                self._writer.close()
                raise
        self._reader.row_factory = sqlite3.Row
        self._last_seq = (-1, 0)

    def read(self, statement: str, *values: Value) -> list[sqlite3.Row]:
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            return self._reader.execute(statement, values).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads inside see one moment, regardless of other processes' commits."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # `:memory:` has one connection, whose own transaction may be open.
            if self._reader.in_transaction:
                yield
                return
            self._reader.execute("BEGIN")
            try:
                yield
            finally:
                self._reader.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, KNOWLEDGE_BASE.translated(self.name):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # On a full disk, SQLite has already rolled back.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Translate errors while values are built from rows."""
        with KNOWLEDGE_BASE.reading(self.name):
            yield

    def last_seq(self) -> int:
        """Return the number of the newest change by any process."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # Read first: a later commit changes the next version, so none is missed. In memory,
            # the single connection does not count its own commits.
            version = self._reader.execute("PRAGMA data_version").fetchone()[0]
            if self._reader is self._writer or version != self._last_seq[0]:
                newest = "SELECT coalesce(max(seq), 0) FROM changes"
                self._last_seq = (version, self._reader.execute(newest).fetchone()[0])
            return self._last_seq[1]

    def close(self) -> None:
        with self._writing, self._reading, KNOWLEDGE_BASE.translated(self.name):
            self._reader.close()
            self._writer.close()


def json_array(values: Collection[str | int]) -> str:
    try:
        text = orjson.dumps(list(values)).decode()
    except TypeError as error:
        raise _id_error(values) from error
    if NUL in text:  # SQLite would cut the text at the NUL
        raise _id_error(values)
    return text


def _id_error(values: Collection[str | int]) -> SettingError:
    return SettingError(
        f"ids must be texts without NULs, got {list(values)!a}", hint="bottega ls shows the ids"
    )


class CloseOnExit(ABC):
    """Context manager that calls `close` on exit."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
