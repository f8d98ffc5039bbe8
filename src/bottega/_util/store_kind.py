"""Kinds of stores: a format version, migrations, and a hash of the declared schema."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

from bottega.errors import DISTRIBUTION, StoreError

DIGEST_LENGTH = 16  # hexadecimal digits
WAY_OUT = "use the version of bottega that wrote it, or another file or database"
COMMENT = re.compile(r"--[^\n]*")
INSIGNIFICANT_SPACE = re.compile(r"\s*([(),;])\s*")


@dataclass(frozen=True)
class StoreKind:
    """Kind of a file, or of the tables in a database.

    `migrations` is append-only from the first release on: entry n contains the SQL statements from
    version n to n + 1. Before the first release it has one entry, which may change: the hash of the
    declaration, which each store contains, distinguishes its schemas. Entry n of `templates`
    contains the statements of version n + 1 that run later, such as those for one table per view;
    the hash includes them. `way_out` is the hint for a store that this version cannot read.
    """

    name: str
    migrations: tuple[str, ...]
    templates: tuple[str, ...] = field(default=(), kw_only=True)

    way_out: str = field(default=WAY_OUT, kw_only=True)

    @property
    def version(self) -> int:
        return len(self.migrations)

    def digest(self, version: int) -> str:
        """Return the hash of the schema of a version. Comments, line breaks and indentation do not
        count."""
        return _digest((*self.migrations[:version], *self.templates[:version]))

    def check(self, location: str, version: int, digest: str | None) -> None:
        """Raise `StoreError` for a newer version, for another schema than that of the version, and
        for a development version, whose stores have no digest."""
        if digest is None:
            problem = f"has development format {version} of the {self.name}"
            raise self._error(location, problem, f"release format {self.version}")
        if version > self.version:
            raise StoreError(
                f"{location} has format {version} of the {self.name}; this version of bottega reads"
                f" up to {self.version}",
                hint=f"pip install --upgrade {DISTRIBUTION}",
            )
        own = self.digest(version if version > 0 else self.version)
        if version < 1 or digest != own:
            shown = digest if digest.isalnum() else ascii(digest)  # damaged
            problem = f"has schema {shown} of {self.name} format {version}"
            raise self._error(location, problem, f"schema {own}")

    def _error(self, location: str, problem: str, wanted: str) -> StoreError:
        return StoreError(
            f"{location} {problem}; this version of bottega reads {wanted}",
            hint=f"{self.way_out}; it was not changed",
        )


@cache
def _digest(statements: tuple[str, ...]) -> str:
    text = "\n;".join(statements)  # the line break ends a comment
    normalized = INSIGNIFICANT_SPACE.sub(r"\1", " ".join(COMMENT.sub("", text).split()))
    return sha256(normalized.encode()).hexdigest()[:DIGEST_LENGTH]
