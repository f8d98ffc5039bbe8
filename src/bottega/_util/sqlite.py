"""SQLite files: connections, file kinds with migrations, and errors."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from bottega.errors import DISTRIBUTION, SettingError, StoreBusyError, StoreError, StoreFullError
from bottega.image import path_text

MEMORY = ":memory:"
PRIMARY_CODE = 0xFF
SWITCHING_SECONDS = 10.0
# Text that is no UTF-8 or no JSON has no error code of its own.
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
    connection = sqlite3.connect(
        _uri(Path(path), create),
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


def _uri(path: Path, create: bool) -> str:
    query = "mode=rwc" if create else "mode=rw"
    if path.exists() and not os.access(path.parent, os.W_OK) and not _has_writer(path):
        query = "mode=ro&immutable=1"
    return f"file:{quote(os.fsencode(path.absolute()))}?{query}"


def _has_writer(path: Path) -> bool:
    """Return whether another process has the file open, which keeps a log and a shared-memory file
    beside it.

    Without the shared-memory file, the log cannot be read in a read-only folder: raises
    `StoreError`.
    """
    wal, shared = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    if shared.exists() or not wal.exists():
        return wal.exists()
    if wal.stat().st_size > 0:
        raise StoreError(
            f"{path_text(path)} was not closed and its folder is read-only",
            hint="open and close it once in a writable folder; copy"
            f" {path_text(wal.name)} along with it",
        )
    return False


@dataclass(frozen=True)
class FileKind:
    """`application_id` tells our file from any other SQLite file. `migrations` is append only:
    entry n turns a file of version n into one of version n + 1. An entry is SQL statements, or a
    function that runs in the open transaction of the connection."""

    name: str
    application_id: int
    migrations: tuple[str | Callable[[sqlite3.Connection], None], ...]

    @property
    def version(self) -> int:
        return len(self.migrations)

    def open(self, path: Path, *, busy_seconds: float) -> sqlite3.Connection:
        """Open or create a file and migrate it. Raises as `connect` and `migrate`."""
        connection = connect(path, busy_seconds=busy_seconds)
        try:
            self.migrate(connection, path_text(path))
        except BaseException:
            connection.close()
            raise
        return connection

    def migrate(self, connection: sqlite3.Connection, path: str) -> None:
        """Brings the file to `version`; refuses newer files and other programs' files."""
        found = self._found(connection, path)
        if found == self.version:
            return
        try:
            self._upgrade(connection, path)
        except sqlite3.OperationalError as error:
            if found == 0 or error.sqlite_errorcode & PRIMARY_CODE != sqlite3.SQLITE_READONLY:
                raise
            raise StoreError(
                f"{path} has format {found}, must be brought to {self.version} to be read, and may"
                " not be written",
                hint="open it, or a copy, once where it may be written",
            ) from error

    def _upgrade(self, connection: sqlite3.Connection, path: str) -> None:
        _write_ahead(connection)
        connection.execute("BEGIN IMMEDIATE")
        # Asked again under the write lock: another process may have migrated meanwhile.
        for migration in self.migrations[self._found(connection, path) :]:
            if callable(migration):
                migration(connection)
                continue
            for statement in migration.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {self.application_id}")
        connection.execute(f"PRAGMA user_version = {self.version}")
        connection.execute("COMMIT")

    def _found(self, connection: sqlite3.Connection, path: str) -> int:
        # In one statement: another process may be creating the file at this moment.
        owner, version, tables = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)"
            " FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if owner != self.application_id and (owner or version or tables):
            raise StoreError(
                f"{path} is a SQLite file of another program, not a {self.name}",
                hint="check the path, or choose a new file name",
            )
        if version > self.version:
            raise StoreError(
                f"{path} has format {version}; this version of bottega reads up to {self.version}",
                hint=f"pip install --upgrade {DISTRIBUTION}",
            )
        return int(version)

    @contextmanager
    def translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translation(error, path) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise SettingError(
                f"{path} cannot hold or look up what was given: {error!a}",
                hint="use texts that UTF-8 can write, and numbers below 2^63",
            ) from error
        except OSError as error:
            raise StoreError(
                f"{path} cannot be opened: {error.strerror}", hint="check the path"
            ) from error

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Around what makes values of ours from rows: SQLite does not notice a flipped bit."""
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
                    f"another process has been writing to {path} for too long",
                    hint="try again when it has finished",
                )
            case sqlite3.SQLITE_FULL:
                return StoreFullError(
                    f"there is no space left for {path}",
                    hint="free some space and try again; what was stored is intact",
                )
            case sqlite3.SQLITE_NOTADB:
                return StoreError(
                    f"{path} is not a {self.name}",
                    hint="check the path, or choose a new file name",
                )
            case sqlite3.SQLITE_READONLY:
                return StoreError(
                    f"{path} may only be read",
                    hint="change its permissions and its folder's, or write to a copy",
                )
            case sqlite3.SQLITE_CORRUPT:
                return _damaged(path, error)
            case sqlite3.SQLITE_CANTOPEN:
                return StoreError(
                    f"{path} cannot be opened", hint="check its permissions and its folder's"
                )
        if str(error).startswith(UNREADABLE):
            return _damaged(path, error)
        if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
            return StoreError(f"{path} is closed", hint="open it again")
        return StoreError(f"{path} failed: {error}", hint="check the disk and the file")


def may_only_be_read(error: BaseException) -> bool:
    """Whether an error of ours says that the file, or its folder, refuses writers."""
    code = getattr(error.__cause__, "sqlite_errorcode", 0) & PRIMARY_CODE
    return bool(code == sqlite3.SQLITE_READONLY)


def _damaged(path: str, error: Exception) -> StoreError:
    return StoreError(
        f"{path} is damaged: {error}",
        # What cannot be locked is read without locks, and its owner may be writing.
        hint="restore it from a copy, or build it again; if you may not write its folder, first"
        " open it again",
    )


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switches a new file to its write-ahead log. SQLite does not wait for others here, whatever
    its time-out: where several processes create the file, all but one must try again."""
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
