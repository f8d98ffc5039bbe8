"""SQLite files: connections, file kinds with migrations, and errors."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from bottega._util.store_kind import StoreKind
from bottega.errors import (
    SettingError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from bottega.image import path_text

MEMORY = ":memory:"
PRIMARY_CODE = 0xFF
SWITCHING_SECONDS = 10.0
# SQLite has no error codes for text that is not UTF-8 or not JSON.
UNREADABLE = ("Could not decode to UTF-8", "malformed JSON")


def connect(
    path: str | Path,
    *,
    create: bool = True,
    busy_seconds: float = 10.0,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
) -> sqlite3.Connection:
    """Open a connection that all threads may use.

    With "FULL" a commit waits for the disk. With "NORMAL" a crash of the process loses no commit;
    a crash of the machine may lose the last ones but does not damage the file. A file without write
    permission opens read-only. Raises errors of SQLite (see `FileKind.translated`) and
    `StoreError`.
    """
    if path == MEMORY:
        return sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
    path, mode = Path(path), "mode=rwc" if create else "mode=rw"
    # SQLite cannot create its shared memory in a read-only folder, so it must assume no writer.
    if path.exists() and not os.access(path.parent, os.W_OK) and not _has_writer(path):
        mode = "mode=ro&immutable=1"
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path.absolute()))}?{mode}",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    except BaseException:
        connection.close()
        raise
    return connection


def _has_writer(path: Path) -> bool:
    """Return whether another process has the file open: its log and shared memory are beside it.

    Raises `StoreError` for a log without shared memory, which cannot be read in a read-only folder.
    """
    wal, shared = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    if shared.exists() or not wal.exists():
        return wal.exists()
    if wal.stat().st_size > 0:
        raise StoreError(
            f"{path_text(path)} was not closed, and its folder is read-only",
            hint="open and close it once in a writable folder; copy"
            f" {path_text(wal.name)} along with it",
        )
    return False


@dataclass(frozen=True)
class FileKind(StoreKind):
    """Kind of a SQLite file, identified by `application_id`. The version is in `user_version`, the
    hash of the schema in the table `bottega_schema`."""

    application_id: int

    def open(self, path: Path, *, create: bool = True, busy_seconds: float) -> sqlite3.Connection:
        """Open or create a file and migrate it. Raises as `connect` and `migrate`."""
        connection = connect(path, create=create, busy_seconds=busy_seconds)
        try:
            self.migrate(connection, path_text(path))
        except BaseException:
            connection.close()
            raise
        return connection

    def migrate(self, connection: sqlite3.Connection, path: str) -> None:
        """Create the tables of a new file, or migrate an older one. Raises `StoreError`, without
        changing the file, for one of another program or of a format that `check` rejects."""
        found = self._checked_version(connection, path)
        if found == self.version:
            return
        try:
            self._upgrade(connection, path)
        except sqlite3.OperationalError as error:
            if found == 0 or error.sqlite_errorcode & PRIMARY_CODE != sqlite3.SQLITE_READONLY:
                raise
            raise StoreError(
                f"{path} must be migrated to format {self.version}, but is read-only and has format"
                f" {found}",
                hint="open it, or a copy, once where it is writable",
            ) from error

    def _upgrade(self, connection: sqlite3.Connection, path: str) -> None:
        _write_ahead(connection)
        with transaction(connection):
            # Read again under the write lock: another process may have migrated meanwhile.
            found = self._checked_version(connection, path)
            for migration in self.migrations[found:]:
                for statement in _statements(migration):
                    connection.execute(statement)
            if not found:
                connection.execute("CREATE TABLE bottega_schema (digest TEXT NOT NULL)")
                connection.execute("INSERT INTO bottega_schema VALUES ('')")
            connection.execute("UPDATE bottega_schema SET digest = ?", (self.digest(self.version),))
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.version}")

    def _checked_version(self, connection: sqlite3.Connection, path: str) -> int:
        """Return the version of the file, 0 for a new one. Raises `StoreError` as `check`."""
        # One statement sees one moment: another process may be creating the file.
        owner, version, tables, has_digest = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema),"
            " (SELECT count(*) FROM sqlite_schema WHERE name = 'bottega_schema')"
            " FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if owner != self.application_id and (owner or version or tables):
            raise StoreError(
                f"{path} is a SQLite file of another program, not a {self.name}",
                hint="check the path, or choose a new file name",
            )
        if not (version or tables):
            return 0
        if not has_digest:
            self.check(path, version, None)  # raises
        version, digest = connection.execute(
            "SELECT (SELECT user_version FROM pragma_user_version),"
            " coalesce(group_concat(digest), '') FROM bottega_schema"  # one row, unless damaged
        ).fetchone()
        self.check(path, version, digest)
        return int(version)

    @contextmanager
    def translated(self, path: str) -> Iterator[None]:
        """Translate errors of SQLite and of the operating system into those of Bottega."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._translation(error, path) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise SettingError(
                f"{path} cannot store or find a value: {error!a}",
                hint="use texts that UTF-8 can encode, and numbers below 2^63",
            ) from error
        except OSError as error:
            raise StoreError(
                f"{path} cannot be opened: {error.strerror}", hint="check the path"
            ) from error

    @contextmanager
    def connected(
        self, path: Path, *, create: bool = True, busy_seconds: float
    ) -> Iterator[sqlite3.Connection]:
        """Open a connection for one block, without checking the format; translate its errors."""
        with (
            self.translated(path_text(path)),
            closing(connect(path, create=create, busy_seconds=busy_seconds)) as connection,
        ):
            yield connection

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Translate errors while values are built from rows: SQLite detects no flipped bit."""
        try:
            yield
        except (TypeError, ValueError, LookupError) as error:
            raise _damaged(path, error) from error

    def _translation(self, error: sqlite3.Error, path: str) -> StoreError:
        # Errors of the Python module itself, such as a closed connection, carry no code.
        code = getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StoreBusyError(
                    f"{path} is locked by another process that writes to it",
                    hint="try again when it has finished",
                )
            case sqlite3.SQLITE_FULL:
                return StoreFullError(
                    f"{path} cannot grow: no space left on its disk",
                    hint="free disk space and try again; stored data is intact",
                )
            case sqlite3.SQLITE_NOTADB:
                return StoreError(
                    f"{path} is not a {self.name}", hint="check the path, or choose a new file name"
                )
            case sqlite3.SQLITE_READONLY:
                return StoreReadOnlyError(
                    f"{path} is read-only",
                    hint="change the permissions of file and folder, or write to a copy",
                )
            case sqlite3.SQLITE_CORRUPT:
                return _damaged(path, error)
            case sqlite3.SQLITE_CANTOPEN:
                return StoreError(
                    f"{path} cannot be opened", hint="check the permissions of file and folder"
                )
        if str(error).startswith(UNREADABLE):
            return _damaged(path, error)
        if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
            return StoreError(f"{path} is closed", hint="open it again")
        return StoreError(f"{path} failed: {error}", hint="check the disk and the file")


# A file before its kind is known, for messages about damaged ones.
ANY_FILE = FileKind("knowledge base, run or trace store", (), application_id=0)


def application_id(path: Path) -> int:
    """Return the application id of an SQLite file, 0 for other files. Raises `StoreError`."""
    with ANY_FILE.translated(path_text(path)), path.open("rb") as file:
        if not file.read(16).startswith(b"SQLite format 3"):
            return 0
    with ANY_FILE.connected(path, create=False, busy_seconds=1.0) as connection:
        return int(connection.execute("PRAGMA application_id").fetchone()[0])


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Take the write lock, and commit at the end of the block, or roll back after an error. A read
    lock that becomes a write lock would not wait for other writers."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has rolled back already on a full disk
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script. A trigger is one statement with semicolons in it."""
    statement = ""
    for part in script.split(";"):
        statement += f"{part};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _damaged(path: str, error: Exception) -> StoreError:
    return StoreError(
        f"{path} is damaged: {error}",
        # In a read-only folder it is read without locks, and its owner may be writing.
        hint="restore it from a copy, or build it again; in a read-only folder, first open it"
        " again",
    )


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch a file to write-ahead logging. SQLite ignores its time-out here: if several processes
    create the file, all but one must try again."""
    end = time.monotonic() + SWITCHING_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & PRIMARY_CODE == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > end:
                raise
            time.sleep(0.01)
