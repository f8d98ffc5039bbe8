"""Kinds of stores: a format version, migrations, and a hash of the declared schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from bottega.errors import DISTRIBUTION, StoreError

DIGEST_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class StoreKind:
    """Kind of a file or of the tables in a database.

    `migrations` is append-only from the first release on: entry n contains the SQL statements from
    version n to n + 1. Until then the only entry changes, and the hash of the declaration, which
    each store contains, tells its layouts apart. `templates` are statements that run later, such as
    those for one table per view; the hash includes them.
    """

    name: str
    migrations: tuple[str, ...]
    templates: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def version(self) -> int:
        return len(self.migrations)

    def digest(self, version: int) -> str:
        """Return the hash of the schema of a version. White space does not count."""
        texts = (*self.migrations[:version], *self.templates)
        statements = " ".join(" ".join(texts).split())
        return sha256(statements.encode()).hexdigest()[:DIGEST_LENGTH]

    def check(self, location: str, version: int, digest: str | None) -> None:
        """Raise `StoreError` if a store has a newer version, or another schema of its version.
        `digest` is None for a store from before schemas had one."""
        if digest is not None and version > self.version:
            raise StoreError(
                f"{location} has format {version} of the {self.name}; this version of bottega"
                f" reads up to {self.version}",
                hint=f"pip install --upgrade {DISTRIBUTION}",
            )
        if digest is None or digest != self.digest(version):
            own = min(version, self.version)
            raise StoreError(
                f"{location} has another layout of the {self.name}: format {version}, schema"
                f" {digest or 'unknown'}; this version of bottega has format {self.version},"
                f" schema {self.digest(own)}",
                hint="use the version of bottega that wrote it, or give a new file or database;"
                " it was not changed",
            )
