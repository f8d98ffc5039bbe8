"""Store of files and batches: rows in SQLite, and the contents of files in a folder."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import orjson

from bottega._util.durable_files import os_errors, replacement
from bottega._util.progress import plural
from bottega._util.sql_tables import TableSchema, storable_text
from bottega._util.sqlite import transaction
from bottega.gateway.apis.batches.batch_records import (
    BATCHES,
    BATCHES_DB,
    FILES,
    UNFINISHED,
    Batch,
    BatchStatus,
    LineError,
    StoredFile,
)
from bottega.openai_api.errors import ApiError

FILE, FOLDER = "batches.db", "files"
BUSY_SECONDS = 10.0
CHUNK = 1 << 20
MAX_FILENAME = 255  # characters
WAIT_HINT = "wait until the oldest ones expire (batches.keep_days)"
# A file without a row is left over from a crash, unless its upload is still in progress.
ORPHAN_SECONDS = 3600.0


class BatchStore:
    """Files and batches in `folder`, which are created at the first use. Every write is durable on
    return. Methods may be called from any thread; they block and raise `StoreError`, and `ApiError`
    for ids that do not exist or belong to another account."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._files, self._path, self._clock = folder / FOLDER, folder / FILE, clock
        self._name = str(self._path)
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def path(self, file: str) -> Path:
        return self._files / file

    def add_file(
        self,
        account: str,
        filename: str,
        source: IO[bytes],
        *,
        limit: int,
        lifetime: float,
        max_files: int,
    ) -> StoredFile:
        """Store an uploaded file. Raises `ApiError` if the account has `max_files` files already,
        or if they would have more than `limit` bytes."""
        if len(filename) > MAX_FILENAME:
            message = f"the name of the file has more than {MAX_FILENAME} characters"
            raise ApiError(message, param="file", hint="send a shorter filename")
        if self.used_bytes(account) >= limit:
            raise storage_full(limit)
        id = f"file-{secrets.token_hex(16)}"
        size = self._write(id, iter(lambda: source.read(CHUNK), b""))
        now, name = self._clock(), storable_text(filename)
        file = StoredFile(id, account, name, "batch", size, now, now + lifetime)
        with self._transaction() as connection:
            # In the transaction: two uploads at a time must not both fit.
            is_free = _count(connection, "files", account) < max_files
            fits = self._used(connection, account) + size <= limit
            if is_free and fits:
                _insert_file(connection, file)
        if not (is_free and fits):
            self.path(id).unlink(missing_ok=True)
            if is_free:
                raise storage_full(limit)
            hint = f"delete files (DELETE /v1/files/ID), or {WAIT_HINT}"
            raise _too_many("files", plural(max_files, "file", ","), hint)
        return file

    def used_bytes(self, account: str) -> int:
        with self._transaction() as connection:
            return self._used(connection, account)

    def file(self, account: str, id: str) -> StoredFile:
        rows = self._read(
            f"SELECT {FILES.column_list} FROM files WHERE id = ? AND account = ? AND expires > ?",
            *(storable_text(id), account, self._clock()),
        )
        if not rows:
            raise _unknown("file", id)
        return StoredFile(*rows[0])

    def files(
        self, account: str, *, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of files, and whether there are more."""
        where, values = "expires > ?", list[object]([self._clock()])
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, storable_text(purpose)]
        rows = self._page(FILES, account, after, limit, ascending, where, values)
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    def delete_file(self, account: str, id: str) -> None:
        """Delete a file. Raises `ApiError` while an unfinished batch reads it."""
        self.file(account, id)
        with self._transaction() as connection:
            used = connection.execute(
                f"SELECT id FROM batches WHERE input_file = ? AND status IN {UNFINISHED}", (id,)
            ).fetchone()
            if used is None:
                connection.execute("DELETE FROM files WHERE id = ?", (id,))
        if used is not None:
            raise ApiError(
                f"the file {id} is the input of {used[0]}",
                status=409,
                code="file_in_use",
                hint="cancel the batch first, or wait until it has ended",
            )
        self.path(id).unlink(missing_ok=True)

    def add_batch(
        self,
        account: str,
        endpoint: str,
        input_file: str,
        metadata: Mapping[str, str] | None,
        *,
        expires: float,
        limit: int,
        max_batches: int,
    ) -> Batch:
        """Add a batch. Raises `ApiError` if the account has `limit` unfinished ones, or
        `max_batches` with those that have ended."""
        now = self._clock()
        file = self.file(account, input_file)
        if file.purpose != "batch":
            message = f"the purpose of {file.id} is {file.purpose}, not batch"
            raise ApiError(message, param="input_file_id", hint='upload it with purpose="batch"')
        id = f"batch_{secrets.token_hex(16)}"
        batch = Batch(id, account, endpoint, file.id, "validating", now, expires, metadata)
        with self._transaction() as connection:
            # In the transaction: the file may have been deleted since the check above.
            is_kept = connection.execute("SELECT 1 FROM files WHERE id = ?", (file.id,)).fetchone()
            (unfinished,) = connection.execute(
                f"SELECT count(*) FROM batches WHERE account = ? AND status IN {UNFINISHED}",
                (account,),
            ).fetchone()
            is_free = _count(connection, "batches", account) < max_batches
            if is_kept and is_free and unfinished < limit:
                connection.execute(
                    f"INSERT INTO batches ({BATCHES.column_list}) VALUES ({BATCHES.placeholders})",
                    BATCHES.row(batch),
                )
        if not is_kept:
            raise _unknown("file", file.id)
        if unfinished >= limit:
            hint = "wait until one has ended, or cancel one"
            raise _too_many("batches", plural(limit, "unfinished batch", ","), hint)
        if not is_free:
            raise _too_many("batches", plural(max_batches, "batch", ","), WAIT_HINT)
        return batch

    def batch(self, account: str, id: str) -> Batch:
        rows = self._read(
            f"SELECT {BATCHES.column_list} FROM batches WHERE id = ? AND account = ?",
            *(storable_text(id), account),
        )
        if not rows:
            raise _unknown("batch", id)
        return self._with_counts(_batch(rows[0]))

    def batches(self, account: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return a page of batches, the newest first, and whether there are more."""
        rows = self._page(BATCHES, account, after, limit, False, "1", ())
        return [self._with_counts(_batch(row)) for row in rows[:limit]], len(rows) > limit

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all accounts, the oldest first."""
        return [
            _batch(row)
            for row in self._read(
                f"SELECT {BATCHES.column_list} FROM batches WHERE status IN {UNFINISHED}"
                " ORDER BY number"
            )
        ]

    def change_status(self, id: str, status: BatchStatus, *, before: Sequence[BatchStatus]) -> bool:
        """Set the status if it is one of `before`. Return whether it was."""
        with self._transaction() as connection:
            return _set_status(connection, id, status, self._clock(), before)

    def start(self, id: str, total: int) -> None:
        with self._transaction() as connection:
            connection.execute("UPDATE batches SET total = ? WHERE id = ?", (total, id))
            _set_status(connection, id, "in_progress", self._clock(), ("validating",))

    def fail(self, id: str, errors: Sequence[LineError]) -> None:
        """End a batch whose input is invalid."""
        with self._transaction() as connection:
            listed = orjson.dumps([error.json() for error in errors]).decode()
            connection.execute("UPDATE batches SET errors = ? WHERE id = ?", (listed, id))
            _set_status(connection, id, "failed", self._clock(), UNFINISHED)

    def add_result(self, batch: str, line: int, payload: bytes, *, failed: bool) -> None:
        """Store the output of a line, once."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (batch, line, failed, payload),
            )

    def done_lines(self, batch: str) -> set[int]:
        return {line for (line,) in self._read("SELECT line FROM results WHERE batch = ?", batch)}

    def finish(
        self,
        batch: Batch,
        status: BatchStatus,
        errors: Sequence[LineError],
        unsent: Iterable[bytes],
    ) -> None:
        """Write the output file and the error file, which ends with `unsent`, and end the batch.
        File ids follow from the batch's, so a repetition after a crash changes nothing."""
        now, ids = self._clock(), list[str | None]()
        statement = "SELECT expires - created FROM files WHERE id = ?"
        ((lifetime,),) = self._read(statement, batch.input_file)  # kept until the batch has ended
        expires = now + lifetime
        written: list[StoredFile] = []
        for failed, kind, more in ((False, "output", ()), (True, "error", unsent)):
            id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
            size = self._write(id, self._lines(batch.id, failed, more))
            if size:
                name = f"{batch.id}_{kind}.jsonl"
                file = StoredFile(id, batch.account, name, "batch_output", size, now, expires)
                written.append(file)
            else:
                self.path(id).unlink(missing_ok=True)
            ids.append(id if size else None)
        counted = self._with_counts(batch)
        with self._transaction() as connection:
            for file in written:
                _insert_file(connection, file)
            connection.execute(
                "UPDATE batches SET output_file = ?, error_file = ?, completed = ?, failed = ?,"
                " errors = ? WHERE id = ?",
                (
                    *ids,
                    counted.completed,
                    counted.failed,
                    orjson.dumps([error.json() for error in errors]).decode(),
                    batch.id,
                ),
            )
            _set_status(connection, batch.id, status, now, UNFINISHED)
            connection.execute("DELETE FROM results WHERE batch = ?", (batch.id,))

    def remove_expired(self, before: float) -> None:
        """Delete expired files, batches created before this time that have ended, and contents
        without a row."""
        now = self._clock()
        with self._transaction() as connection:
            connection.execute(
                "DELETE FROM files WHERE expires <= ? AND id NOT IN"
                f" (SELECT input_file FROM batches WHERE status IN {UNFINISHED})",
                (now,),
            )
            connection.execute(
                f"DELETE FROM batches WHERE created < ? AND status NOT IN {UNFINISHED}", (before,)
            )
            kept = {id for (id,) in connection.execute("SELECT id FROM files")}
        with os_errors(self._files):
            for path in self._files.iterdir():
                if path.name not in kept and path.stat().st_mtime < now - ORPHAN_SECONDS:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _connection(self) -> sqlite3.Connection:
        """Return the connection. Call it with the lock."""
        if self._opened is None:
            with os_errors(self._files):
                self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened = BATCHES_DB.open(self._path, busy_seconds=BUSY_SECONDS)
            self._opened.execute("PRAGMA synchronous = FULL")
        return self._opened

    def _with_counts(self, batch: Batch) -> Batch:
        """Return the batch with its current counts of completed and failed requests."""
        if batch.is_finished:
            return batch
        statement = "SELECT count(*), coalesce(sum(failed), 0) FROM results WHERE batch = ?"
        ((count, failed),) = self._read(statement, batch.id)
        return replace(batch, completed=count - failed, failed=failed)

    def _lines(self, batch: str, failed: bool, more: Iterable[bytes]) -> Iterator[bytes]:
        lines = self._read(
            "SELECT line FROM results WHERE batch = ? AND failed = ? ORDER BY line", batch, failed
        )
        for (line,) in lines:  # one at a time: all outputs together may not fit into memory
            rows = self._read(
                "SELECT payload FROM results WHERE batch = ? AND line = ?", batch, line
            )
            yield rows[0][0] + b"\n"
        for payload in more:
            yield payload + b"\n"

    def _write(self, id: str, chunks: Iterable[bytes]) -> int:
        """Write the content of a file and return its length."""
        size = 0
        with replacement(self.path(id)) as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
        return size

    def _used(self, connection: sqlite3.Connection, account: str) -> int:
        statement = "SELECT coalesce(sum(size), 0) FROM files WHERE account = ?"
        return int(connection.execute(statement, (account,)).fetchone()[0])

    def _page(
        self,
        table: TableSchema,
        account: str,
        after: str | None,
        limit: int,
        ascending: bool,
        where: str,
        values: Sequence[object],
    ) -> list[sqlite3.Row]:
        """Return up to `limit` rows after the one with the id `after`, and one more if there is
        one."""
        if after is not None:
            sign = ">" if ascending else "<"
            where += (
                f" AND number {sign} (SELECT number FROM {table.name} WHERE id = ? AND account = ?)"
            )
            values = [*values, storable_text(after), account]
        order = "ASC" if ascending else "DESC"
        return self._read(
            f"SELECT {table.column_list} FROM {table.name} WHERE account = ? AND {where}"
            f" ORDER BY number {order} LIMIT ?",
            *(account, *values, limit + 1),
        )

    def _read(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock, BATCHES_DB.translated(self._name):
            return self._connection().execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with (
            self._lock,
            BATCHES_DB.translated(self._name),
            transaction(self._connection()) as connection,
        ):
            yield connection


def storage_full(limit: int) -> ApiError:
    return ApiError(
        f"the files of this key would exceed {limit:,} bytes",
        status=413,
        code="storage_full",
        hint="delete files first (DELETE /v1/files/ID)",
    )


def _too_many(kind: str, limit: str, hint: str) -> ApiError:
    return ApiError(
        f"this key has reached its limit of {limit}",
        status=429,
        type="rate_limit_error",
        code=f"too_many_{kind}",
        headers={"x-should-retry": "false"},
        hint=hint,
    )


def _count(connection: sqlite3.Connection, table: str, account: str) -> int:
    counted = f"SELECT count(*) FROM {table} WHERE account = ?"
    return int(connection.execute(counted, (account,)).fetchone()[0])


def _insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO files ({FILES.column_list}) VALUES ({FILES.placeholders})",
        FILES.row(file),
    )


def _set_status(
    connection: sqlite3.Connection,
    id: str,
    status: BatchStatus,
    now: float,
    before: Sequence[BatchStatus],
) -> bool:
    marks = ", ".join("?" * len(before))
    return bool(
        connection.execute(
            "UPDATE batches SET status = ?, times = json_set(times, '$.' || ?, ?)"
            f" WHERE id = ? AND status IN ({marks})",
            (status, status, now, id, *before),
        ).rowcount
    )


def _batch(row: sqlite3.Row) -> Batch:
    values: dict[str, Any] = dict(zip(BATCHES.names, row, strict=True))
    for name in ("metadata", "times", "errors"):
        values[name] = orjson.loads(values[name] or "null")
    values["errors"] = [LineError(**error) for error in values["errors"]]
    return Batch(**values)


def _unknown(kind: str, id: str) -> ApiError:
    return ApiError(
        f"no such {kind}: {id[:100]!r}",
        status=404,
        code="not_found",
        hint=f"GET /v1/{'batches' if kind == 'batch' else 'files'} lists those of this key",
    )
