"""Knowledge base files as source and target of a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bottega._util.durable_files import os_errors
from bottega.errors import StoreBusyError, StoreError
from bottega.image import path_text
from bottega.knowledge.copy_store import (
    ALL_COLUMNS,
    LogEntry,
    RowHeader,
    StoredRow,
    example_values,
    image_values,
    other_source_error,
    shown_values,
    unfinished_views,
    use_values,
)
from bottega.knowledge.records import StoredView
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.writes import LOST_PREFIX, blob_and_checksum
from bottega.knowledge.stores import UNFINISHED

COPIED = "copied from"
PART = ".part"
UNUSED = (
    "SELECT count(*) FROM images WHERE sha256 NOT IN"
    " (SELECT sha256 FROM example_images JOIN examples USING (key))"
)
VIEWS = "SELECT number, name, fingerprint, dimension FROM views"


class FileSource(SqliteRows):
    """Existing knowledge base file."""

    def __init__(self, path: str) -> None:
        super().__init__(path, create=False)

    @property
    def location(self) -> str:
        return self.path

    def headers(self, after: int, last: int, limit: int) -> list[RowHeader]:
        found = self.read(
            "SELECT key, namespace, (SELECT coalesce(sum(length(data)), 0) FROM example_images"
            " JOIN images USING (sha256) WHERE example_images.key = examples.key)"
            " FROM examples WHERE key > ? AND key <= ? ORDER BY key LIMIT ?",
            *(after, last, limit),
        )
        return [RowHeader(*row) for row in found]

    def logged(self, after: int, limit: int) -> list[LogEntry]:
        found = self.read(
            "SELECT seq, op, key, id, namespace FROM changes"
            " WHERE op != 'view' AND seq > ? ORDER BY seq LIMIT ?",
            after,
            limit,
        )
        return [LogEntry(*row) for row in found]

    def notes(self) -> dict[str, str]:
        found = self.read("SELECT name, value FROM notes WHERE name != ? ORDER BY name", UNFINISHED)
        return {row["name"]: row["value"] for row in found}

    def pruned_by_namespace(self) -> dict[str, int]:
        found = self.read("SELECT name, value FROM meta WHERE name LIKE ? || '%'", LOST_PREFIX)
        return {row["name"].removeprefix(LOST_PREFIX): int(row["value"]) for row in found}

    def count_images(self) -> int:
        counted = "SELECT count(DISTINCT sha256) FROM example_images JOIN examples USING (key)"
        return int(self.read(counted)[0][0])

    def uncopied(self) -> list[str]:
        views = self.read(
            "SELECT name, fingerprint, count(vectors.key) AS n FROM views"
            " LEFT JOIN vectors ON view = number WHERE NOT complete GROUP BY number"
        )
        ((images,),) = self.read(UNUSED)
        return [
            *unfinished_views((row["name"], row["fingerprint"], row["n"]) for row in views),
            *([f"images that no example uses ({images})"] if images else []),
        ]


class FileTarget(FileSource):
    """New file, which has the suffix `.part` until it is published."""

    def __init__(self, path: str) -> None:
        self._final = Path(path).absolute()
        self.check_new(path)
        SqliteRows.__init__(self, f"{self._final}{PART}", create=True)
        self.name = path_text(path)

    @staticmethod
    def check_new(path: str | Path) -> None:
        """Raise `StoreError` if the file exists."""
        if Path(path).exists():
            raise StoreError(
                f"{path_text(path)} already exists", hint="set TO to the name of a new file"
            )

    def all_views(self) -> list[StoredView]:
        return [StoredView(*row) for row in self.read(f"{VIEWS} ORDER BY number")]

    def begin(self, source: str, views: Sequence[StoredView]) -> None:
        if (other := self.note(UNFINISHED)) not in (None, source):
            raise other_source_error(self.name, str(other), source, f"delete {self.path}")
        copied = self.read("SELECT value FROM meta WHERE name = ?", COPIED)
        own = bool(copied) and copied[0]["value"] == source  # finished, but not renamed
        if other is None and not own and (self.sizes()[0] or self.all_views()):
            raise StoreError(
                f"{self.path} is in the way: it contains no unfinished copy",
                hint="set TO to another name, or move that file",
            )
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (UNFINISHED, source))
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (COPIED, source))
            found = {StoredView(*row) for row in connection.execute(VIEWS).fetchall()}
            for view in found - set(views):
                connection.execute("DELETE FROM vectors WHERE view = ?", [view.number])
                connection.execute("DELETE FROM views WHERE number = ?", [view.number])
            connection.executemany(
                "INSERT INTO views (number, name, fingerprint, dimension, complete)"
                " VALUES (?, ?, ?, ?, 0)",
                [
                    (view.number, view.name, view.fingerprint, view.dimension)
                    for view in views
                    if view not in found
                ],
            )

    def replace_rows(
        self, after: int, last: int, rows: Sequence[StoredRow], views: Sequence[StoredView]
    ) -> None:
        with self.transaction() as connection:
            for table in ("vectors", "example_images", "uses", "examples"):
                connection.execute(f"DELETE FROM {table} WHERE key > ? AND key <= ?", (after, last))
            connection.executemany(
                f"INSERT INTO examples ({', '.join(ALL_COLUMNS)})"
                f" VALUES ({', '.join('?' * len(ALL_COLUMNS))})",
                map(example_values, rows),
            )
            connection.executemany(
                "INSERT INTO images VALUES (?, ?, ?, ?, ?) ON CONFLICT (sha256)"
                " DO UPDATE SET data = excluded.data WHERE data IS NOT excluded.data",
                image_values(rows),
            )
            connection.executemany(
                "INSERT INTO example_images VALUES (?, ?, ?, ?)", shown_values(rows)
            )
            connection.executemany(
                "INSERT INTO uses (key, count, last_used, saved_usd, pinned)"
                " VALUES (?, ?, ?, ?, ?)",
                use_values(rows),
            )
            for view in views:
                connection.executemany(
                    "INSERT INTO vectors (key, view, vector, checksum) VALUES (?, ?, ?, ?)",
                    [
                        (row.key, view.number, *blob_and_checksum(vector))
                        for row in rows
                        if (vector := row.vectors[view.name]) is not None
                    ],
                )

    def replace_log(self, after: int, last: int, entries: Sequence[LogEntry]) -> None:
        with self.transaction() as connection:
            connection.execute("DELETE FROM changes WHERE seq > ? AND seq <= ?", (after, last))
            connection.executemany(
                "INSERT INTO changes (seq, op, key, id, namespace) VALUES (?, ?, ?, ?, ?)", entries
            )

    def write_settings(self, notes: Mapping[str, str], pruned: Mapping[str, int]) -> None:
        with self.transaction() as connection:
            connection.execute("DELETE FROM notes WHERE name != ?", [UNFINISHED])
            connection.executemany("INSERT INTO notes VALUES (?, ?)", notes.items())
            connection.execute("DELETE FROM meta WHERE name LIKE ? || '%'", [LOST_PREFIX])
            connection.executemany(
                "INSERT INTO meta VALUES (?, ?)",
                [(f"{LOST_PREFIX}{name}", str(seq)) for name, seq in pruned.items()],
            )
            connection.execute(
                "DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM example_images)"
            )
            # Keys in the log must not be reused.
            connection.execute("DELETE FROM sqlite_sequence WHERE name = 'examples'")
            connection.execute(
                "INSERT INTO sqlite_sequence SELECT 'examples', coalesce(max(key), 0) FROM"
                " (SELECT key FROM examples UNION ALL SELECT key FROM changes)"
            )

    def publish(self) -> None:
        with self.transaction() as connection:
            connection.execute("UPDATE views SET complete = 1")
            connection.execute("DELETE FROM notes WHERE name = ?", [UNFINISHED])
        # Closing moves the write-ahead log into the file only for the last connection.
        if self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise StoreBusyError(
                f"{self.path} is in use by another process", hint="end it, and repeat the command"
            )
        self.close()
        with os_errors(self._final.parent):
            self.check_new(self._final)
            Path(self.path).rename(self._final)
