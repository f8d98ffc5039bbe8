"""Locations of stores: files and PostgreSQL databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bottega._util.durable_files import lock_file, os_errors
from bottega._util.postgres import PostgresKind, has_password, is_postgres_url, url_without_password
from bottega._util.postgres_database import PostgresDatabase
from bottega.errors import SettingError, StoreBusyError

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
COMMAND_LOCK = 0x42747466  # advisory lock of commands that must run alone
WITHOUT_TABLES = PostgresKind("lock", ())


@dataclass(frozen=True)
class StoreLocation:
    """Path of a file or URL of a database. `str()` omits the password of a URL."""

    target: Path | str

    @classmethod
    def from_argument(cls, text: str) -> Self:
        """Return the location given in an argument. Raises `SettingError` for a URL with a
        password, which other users of the machine could read."""
        if not is_postgres_url(text):
            if scheme := SCHEME.match(text):
                raise SettingError(
                    f"URLs of the scheme {scheme[1]} are not supported",
                    hint="use postgresql://user@host/database, or the path of a file",
                )
            return cls(Path(text))
        if has_password(text):
            raise SettingError(
                f"{url_without_password(text)} was given with a password, which other users can"
                " read in the list of processes",
                hint="set the environment variable PGPASSWORD, or write ~/.pgpass",
            )
        return cls(text)

    @property
    def file(self) -> Path | None:
        """Path of a file, None for a database."""
        return self.target if isinstance(self.target, Path) else None

    def exists(self) -> bool:
        """Return whether the file exists. Always true for a database, which may lack its tables."""
        return self.file is None or self.file.exists()

    def may_hold_examples(self) -> bool:
        """Return whether the file exists and is not empty, as it may be after a kill. Always true
        for a database."""
        return self.file is None or (self.file.is_file() and self.file.stat().st_size > 0)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of commands that change the store. Raises `StoreBusyError`."""
        with self._lock() as is_held:
            if not is_held:
                raise StoreBusyError(
                    f"{self} is locked by another process",
                    hint="wait until that process has finished",
                )
            yield

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        if self.file is None:
            database = PostgresDatabase(str(self.target), WITHOUT_TABLES)
            with closing(database), database.lock(COMMAND_LOCK) as is_held:
                yield is_held
            return
        path = self.file.with_name(f"{self.file.name}.lock")
        with os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_file(path)
        with lock or nullcontext():
            yield lock is not None

    def __str__(self) -> str:
        if isinstance(self.target, Path):
            return str(self.target)
        return url_without_password(self.target)

    def __repr__(self) -> str:
        return f"StoreLocation({str(self)!r})"
