"""The SQLite file of a knowledge base: two connections and how statements run on them."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import orjson

from bottega.errors import SettingError
from bottega.image import path_text
from bottega.knowledge.connection import MEMORY, connect
from bottega.knowledge.records import Value
from bottega.knowledge.schema import KNOWLEDGE_BASE

# A list of any length as one parameter.
NUL = "\\u0000"
LISTED = "(SELECT value FROM json_each(?))"


class Database:
    """Reads and writes go over two connections, so that no reader waits for a writer's disk."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = 10.0) -> None:
        # The working folder may change, and index files lie beside the database.
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
        """What is read inside is of one moment, whatever other processes commit meanwhile."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # In memory there is one connection, and a transaction of its own may be open.
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
                # On a full disk SQLite has already rolled back.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around what makes values of ours from rows."""
        with KNOWLEDGE_BASE.reading(self.name):
            yield

    def last_seq(self) -> int:
        """The number of the newest change, by any process."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # Asked first: a commit after it shows in the next version, never in none. In memory
            # the only connection does not count its own commits.
            version = self._reader.execute("PRAGMA data_version").fetchone()[0]
            if self._reader is self._writer or version != self._last_seq[0]:
                newest = "SELECT coalesce(max(seq), 0) FROM changes"
                self._last_seq = (version, self._reader.execute(newest).fetchone()[0])
            return self._last_seq[1]

    def close(self) -> None:
        with self._writing, self._reading, KNOWLEDGE_BASE.translated(self.name):
            self._reader.close()
            self._writer.close()


def listed(values: Collection[str | int]) -> str:
    try:
        text = orjson.dumps(list(values)).decode()
    except TypeError as error:
        raise _no_ids(values) from error
    if NUL in text:  # SQLite would look for what stands before it
        raise _no_ids(values)
    return text


def _no_ids(values: Collection[str | int]) -> SettingError:
    return SettingError(f"cannot look up {list(values)!a}", hint="ids are texts without NULs")
