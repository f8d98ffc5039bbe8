"""Images of traces: files in a folder, or rows in PostgreSQL."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from bottega._util.durable_files import os_errors
from bottega._util.sql_tables import SqlTables
from bottega.image import Image

INSERT = (
    "INSERT INTO trace_images (sha256, time, data) VALUES (?1, ?2, ?3)"
    " ON CONFLICT (sha256) DO UPDATE SET time = excluded.time"
)
DELETE_OLDEST = (
    "DELETE FROM trace_images WHERE sha256 IN (SELECT sha256 FROM (SELECT sha256,"
    " sum(length(data)) OVER (ORDER BY time DESC, sha256) AS total FROM trace_images) AS sums"
    " WHERE total > ?1)"
)


class TraceImages(Protocol):
    """Images by their sha256, each with the time of its newest trace. All methods raise
    `StoreError`."""

    def put(self, times: Mapping[Image, float]) -> None:
        """Store images with the unix seconds of their traces."""
        ...

    def get(self, sha256: str) -> Image | None: ...

    def prune(self, before: float, max_bytes: int | None) -> None:
        """Delete images older than `before`, then the oldest beyond `max_bytes` in total."""
        ...


class ImageFolder:
    """Images in files named by their sha256, which is compared when they are read. The time is that
    of the file.

    Files are not synchronized with the disk: a machine crash may lose the newest images. An image
    in a database would be written twice, to the write-ahead log and to the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, times: Mapping[Image, float]) -> None:
        if not times:
            return
        with os_errors(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for image, time in times.items():
                path = self._folder / image.sha256
                with suppress(FileNotFoundError):  # another process prunes it at this moment
                    _write(path, image.data)
                    os.utime(path, (time, time))

    def get(self, sha256: str) -> Image | None:
        with os_errors(self._folder):
            try:
                data = (self._folder / sha256).read_bytes()
            except FileNotFoundError:
                return None
        # An interrupted write, or a name that is no hash.
        if hashlib.sha256(data).hexdigest() != sha256:
            return None
        return Image.from_bytes(data)

    def prune(self, before: float, max_bytes: int | None) -> None:
        total = 0
        with os_errors(self._folder):
            for time, size, path in sorted(self._files(), reverse=True):
                total += size
                if time < before or (max_bytes is not None and total > max_bytes):
                    Path(path).unlink(missing_ok=True)

    def _files(self) -> list[tuple[float, int, str]]:
        """Return time, size and path of each file. Another process may delete some meanwhile."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, entry.path))
        return found


def _write(path: Path, data: bytes) -> None:
    """Write a file, unless it exists with this size."""
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        if path.stat().st_size != len(data):  # an interrupted write
            path.write_bytes(data)


class ImageTable:
    """Images in a table in PostgreSQL."""

    def __init__(self, tables: SqlTables) -> None:
        self._tables = tables

    def put(self, times: Mapping[Image, float]) -> None:
        self._tables.write(
            [(INSERT, (image.sha256, time, image.data)) for image, time in times.items()]
        )

    def get(self, sha256: str) -> Image | None:
        rows = self._tables.execute("SELECT data FROM trace_images WHERE sha256 = ?1", sha256)
        return Image.from_bytes(bytes(rows[0][0])) if rows else None

    def prune(self, before: float, max_bytes: int | None) -> None:
        self._tables.execute("DELETE FROM trace_images WHERE time < ?1", before)
        if max_bytes is not None:
            self._tables.execute(DELETE_OLDEST, max_bytes)
