"""What an index is made from and kept up to date by: vectors, and the log of changes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from bottega.knowledge.database import LISTED, Database, listed
from bottega.knowledge.ports import Change
from bottega.knowledge.pruning import LOST
from bottega.protocols import Vectors
from bottega.types import Changed

FIRST_VIEW = 1


class ChangeLog(Database):
    """Of one namespace of a file."""

    def __init__(
        self,
        path: str,
        *,
        create: bool = True,
        busy_seconds: float = 10.0,
        namespace: str = "",
    ) -> None:
        super().__init__(path, create=create, busy_seconds=busy_seconds)
        self.namespace = namespace

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM vectors WHERE view = ? AND key IN {LISTED}",
            view,
            listed(keys),
        )
        with self.understood():
            return {key: np.frombuffer(blob, np.float32) for key, blob in found}

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]:
        found = self.read(
            "SELECT examples.key, vector FROM examples JOIN vectors USING (key)"
            " WHERE namespace = ? AND view = ? AND examples.key > ?"
            " ORDER BY examples.key LIMIT ?",
            self.namespace,
            view,
            key,
            limit,
        )
        with self.understood():
            return [(key, np.frombuffer(blob, np.float32)) for key, blob in found]

    def keys_digest(self) -> tuple[int, int]:
        (row,) = self.read(
            "SELECT count(*), coalesce(sum(key), 0) FROM examples WHERE namespace = ?",
            self.namespace,
        )
        return row[0], row[1]

    def mark(self, seq: int) -> int | None:
        found = self.read("SELECT mark FROM changes WHERE seq = ?", seq)
        return int(found[0][0]) if found else None

    def pruned(self) -> int:
        found = self.read("SELECT value FROM meta WHERE name = ?", f"{LOST}{self.namespace}")
        return int(found[0][0]) if found else 0

    def changes_since(self, seq: int, limit: int, view: int = FIRST_VIEW) -> list[Change]:
        """Those of other namespaces come along, without vectors: to this index they are rows that
        it never had."""
        found = self.read(
            "SELECT seq, changes.key, vector FROM changes LEFT JOIN vectors"
            " ON vectors.key = changes.key AND view = ? AND namespace = ?"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            view,
            self.namespace,
            seq,
            limit,
        )
        with self.understood():
            return [
                Change(seq, key, None if blob is None else np.frombuffer(blob, np.float32))
                for seq, key, blob in found
            ]

    def named_changes_since(self, seq: int, limit: int) -> list[Changed]:
        # Changes from before the log kept ids are skipped: no follower can know their rows. If a
        # migration gave a row another id (format 6), the earlier id counts as deleted.
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM examples"
            " WHERE key = changes.key AND id = changes.id)"
            " FROM changes WHERE namespace = ? AND id IS NOT NULL AND seq > ? ORDER BY seq LIMIT ?",
            self.namespace,
            seq,
            limit,
        )
        return [Changed(seq, id, bool(deleted)) for seq, id, deleted in found]
