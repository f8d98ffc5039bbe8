"""Knowledge base files as source and target of a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega._util.durable_files import os_errors
from bottega.errors import StoreBusyError, StoreError
from bottega.image import path_text
from bottega.knowledge.copy_store import CopyStore, RepeatedStatement, StoredRow, other_source_error
from bottega.knowledge.records import StoredView
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.writes import LOST_PREFIX, blob_and_checksum
from bottega.knowledge.stores import UNFINISHED

COPIED = "copied from"
PART = ".part"


class FileCopy(CopyStore):
    """Existing file, or with `is_target` a new one, whose name ends in `.part` until it is
    published."""

    row_tables = ("kb_vectors", "kb_example_images", "kb_uses", "kb_examples")
    continue_numbers = (
        "DELETE FROM sqlite_sequence WHERE name = 'examples'",
        "INSERT INTO sqlite_sequence SELECT 'examples', coalesce(max(key), 0) FROM"
        " (SELECT key FROM kb_examples UNION ALL SELECT key FROM kb_changes)",
    )

    def __init__(self, path: str, *, is_target: bool) -> None:
        self._final = Path(path).absolute()
        if is_target:
            check_new(path)
        self._file = SqliteRows(f"{self._final}{PART}" if is_target else path, create=is_target)
        name = path_text(path) if is_target else self._file.name
        super().__init__(self._file, name=name, location=self._file.path)

    def read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._file.read(statement.replace("kb_", ""), *values)]

    def write(self, statements: Iterable[RepeatedStatement]) -> None:
        with self._file.transaction() as connection:
            for statement, runs in statements:
                connection.executemany(statement.replace("kb_", ""), runs)

    def begin(self, source: str, views: Sequence[StoredView]) -> None:
        if (other := self._file.note(UNFINISHED)) not in (None, source):
            remedy = f"delete {self.location}"
            raise other_source_error(self.name, str(other), source, remedy)
        found = self.all_views()
        copied = self.read("SELECT value FROM meta WHERE name = ?1", COPIED)
        own = [(source,)] == copied  # finished, but not renamed
        if other is None and not own and (self._file.sizes()[0] or found):
            raise StoreError(
                f"{self.location} is in the way: it contains no unfinished copy",
                hint="set TO to another name, or move that file",
            )
        dropped = [(view.number,) for view in found if view not in views]
        new = [
            (view.number, view.name, view.fingerprint, view.dimension)
            for view in views
            if view not in found
        ]
        self.write(
            [
                ("INSERT OR REPLACE INTO notes VALUES (?1, ?2)", [(UNFINISHED, source)]),
                ("INSERT OR REPLACE INTO meta VALUES (?1, ?2)", [(COPIED, source)]),
                ("DELETE FROM vectors WHERE view = ?1", dropped),
                ("DELETE FROM views WHERE number = ?1", dropped),
                (
                    "INSERT INTO views (number, name, fingerprint, dimension, complete)"
                    " VALUES (?1, ?2, ?3, ?4, 0)",
                    new,
                ),
            ]
        )

    def pruned_by_namespace(self) -> dict[str, int]:
        found = self.read("SELECT name, value FROM meta WHERE name LIKE ?1 || '%'", LOST_PREFIX)
        return {name.removeprefix(LOST_PREFIX): int(value) for name, value in found}

    def write_pruned(self, pruned: Mapping[str, int]) -> list[RepeatedStatement]:
        lost = [(f"{LOST_PREFIX}{name}", str(seq)) for name, seq in pruned.items()]
        return [
            ("DELETE FROM meta WHERE name LIKE ?1 || '%'", [(LOST_PREFIX,)]),
            ("INSERT INTO meta VALUES (?1, ?2)", lost),
        ]

    def insert_vectors(self, view: StoredView, rows: Sequence[StoredRow]) -> RepeatedStatement:
        return "INSERT INTO vectors (key, view, vector, checksum) VALUES (?1, ?2, ?3, ?4)", [
            (row.key, view.number, *blob_and_checksum(vector))
            for row in rows
            if (vector := row.vectors[view.name]) is not None
        ]

    def publish(self) -> None:
        super().publish()
        # Closing moves the write-ahead log into the file only for the last connection.
        if self._file.checkpoint():
            raise StoreBusyError(
                f"{self.location} is in use by another process",
                hint="end it, and repeat the command",
            )
        self.close()
        with os_errors(self._final.parent):
            check_new(self._final)
            Path(self.location).rename(self._final)


def check_new(path: str | Path) -> None:
    """Raise `StoreError` if the file exists."""
    if Path(path).exists():
        raise StoreError(
            f"{path_text(path)} already exists", hint="set TO to the name of a new file"
        )
