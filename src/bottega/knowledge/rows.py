"""Examples in one SQLite file: the truth from which indexes are derived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bottega.image import Image
from bottega.knowledge import writing
from bottega.knowledge.database import LISTED, Database, listed
from bottega.knowledge.filters import LABELS, Filter, condition
from bottega.knowledge.ports import (
    Capacity,
    Change,
    Embedded,
    Footprint,
    StoredView,
    Use,
)
from bottega.knowledge.pruning import LOST, prune
from bottega.knowledge.records import Standing, from_row
from bottega.protocols import Vectors
from bottega.types import Changed, Example, Query

FIRST_VIEW = 1
# CROSS JOIN: SQLite shall walk the list and look up each key, whatever it takes it for.
CHOSEN_EXAMPLES = (
    "SELECT examples.* FROM json_each(?) AS chosen CROSS JOIN examples"
    " ON examples.key = chosen.value"
)
CHOSEN_IMAGES = (
    "SELECT shown.key, data, media_type, sha256, width, height, source"
    " FROM json_each(?) AS chosen CROSS JOIN example_images AS shown ON shown.key = chosen.value"
    " CROSS JOIN images USING (sha256) ORDER BY shown.key, place"
)


class SqliteRows(Database):
    """The rows of one namespace; those of the others are as if they were not there."""

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

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, Embedded],
        capacity: Capacity | None = None,
        standings: Mapping[str, Standing] | None = None,
    ) -> int:
        with self.transaction() as connection:
            numbers = writing.claim(connection, views)
            new = 0
            for example, *vectors in zip(
                examples, *(made.vectors for made in views.values()), strict=True
            ):
                by_number = dict(zip(numbers, vectors, strict=True))
                key = writing.insert(connection, example, by_number, self.namespace)
                new += key is not None
                standing = (standings or {}).get(example.id or "")
                if key is not None and standing is not None:
                    writing.stand(connection, key, standing)
            if new and capacity is not None:
                writing.make_room(connection, self.namespace, capacity)
            if new:
                prune(connection, new)
            return new

    def delete(self, ids: Collection[str]) -> int:
        with self.transaction() as connection:
            found = connection.execute(
                f"SELECT key FROM examples WHERE namespace = ? AND id IN {LISTED}",
                (self.namespace, listed(ids)),
            )
            keys = [row[0] for row in found]
            writing.remove(connection, keys)
            return len(keys)

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        # One snapshot for both: another process may delete an example between them.
        with self.snapshot():
            found = self.by_keys(self.keys(ids).values())
        return {str(example.id): example for example in found.values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        chosen = listed(keys)
        with self.snapshot():
            rows = self.read(CHOSEN_EXAMPLES, chosen)
            pictures = self.read(CHOSEN_IMAGES, chosen)
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for key, *fields in pictures:
            images[key].append(Image(*fields))
        with self.understood():
            return {row["key"]: from_row(row, images[row["key"]]) for row in rows}

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            f"SELECT id, key FROM examples WHERE namespace = ? AND id IN {LISTED}",
            self.namespace,
            listed(ids),
        )
        return {row["id"]: row["key"] for row in found}

    def own_keys(self, query: Query) -> set[int]:
        if not query.images and query.id is None:
            return set()
        found = self.read(
            f"SELECT key FROM example_images WHERE sha256 IN {LISTED}"
            " UNION SELECT key FROM examples WHERE namespace = ? AND id = ?",
            listed({image.sha256 for image in query.images}),
            self.namespace,
            query.id,
        )
        return {row[0] for row in found}

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        # "g" follows the last hexadecimal digit.
        found = self.read(
            "SELECT id FROM examples WHERE namespace = ? AND id >= ? AND id < ?"
            " ORDER BY id LIMIT ?",
            self.namespace,
            prefix,
            prefix + "g",
            limit,
        )
        return [row[0] for row in found]

    def ids_where(self, where: Filter | None = None) -> list[str]:
        text, values = ("true", []) if where is None else condition(where)
        found = self.read(
            f"SELECT id FROM examples WHERE namespace = ? AND {text} ORDER BY examples.key",
            self.namespace,
            *values,
        )
        return [row[0] for row in found]

    def keys_where(self, where: Filter, after: int = 0) -> list[int]:
        text, values = condition(where)
        found = self.read(
            "SELECT examples.key FROM examples WHERE namespace = ? AND examples.key > ?"
            f" AND {text} ORDER BY examples.key",
            self.namespace,
            after,
            *values,
        )
        return [row[0] for row in found]

    def last_key(self) -> int:
        return int(self.read("SELECT coalesce(max(key), 0) FROM examples")[0][0])

    def count(self) -> int:
        found = self.read("SELECT count(*) FROM examples WHERE namespace = ?", self.namespace)
        return int(found[0][0])

    def labels(self) -> dict[str, list[str]]:
        found = self.read(
            f"SELECT label.value, examples.id FROM examples, {LABELS} AS label"
            " WHERE namespace = ? ORDER BY examples.key, label.key",
            self.namespace,
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for label, id_ in found:
            ids[label].append(id_)
        return dict(ids)

    def is_multi_label(self) -> bool:
        (row,) = self.read(
            "SELECT EXISTS (SELECT 1 FROM examples WHERE namespace = ?"
            " AND labels IS NOT NULL AND json_array_length(labels) != 1)",
            self.namespace,
        )
        return bool(row[0])

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM notes WHERE name = ?", name)
        return found[0][0] if found else None

    def set_note(self, name: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def views(self) -> dict[str, StoredView]:
        return {row["name"]: StoredView(*row) for row in self.read(writing.COMPLETE_VIEWS)}

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
        # Of what was deleted before the log kept ids, nobody can have made anything.
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM examples WHERE key = changes.key)"
            " FROM changes WHERE namespace = ? AND id IS NOT NULL AND seq > ? ORDER BY seq LIMIT ?",
            self.namespace,
            seq,
            limit,
        )
        return [Changed(seq, id, bool(deleted)) for seq, id, deleted in found]

    def add_uses(self, uses: Mapping[str, Use]) -> None:
        with self.transaction() as connection:
            writing.add_uses(connection, self.namespace, uses)

    def pin(self, ids: Collection[str], pinned: bool) -> int:
        with self.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO uses (key, pinned)"
                f" SELECT key, ? FROM examples WHERE namespace = ? AND id IN {LISTED}"
                " ON CONFLICT (key) DO UPDATE SET pinned = excluded.pinned",
                (pinned, self.namespace, listed(ids)),
            )
            return cursor.rowcount

    def standings(self, keys: Collection[int]) -> dict[int, Standing]:
        found = self.read(
            "SELECT examples.key, created, coalesce(count, 0), last, coalesce(saved_usd, 0),"
            " coalesce(pinned, 0) FROM json_each(?) AS chosen CROSS JOIN examples"
            " ON examples.key = chosen.value LEFT JOIN uses ON uses.key = examples.key",
            listed(keys),
        )
        return {row[0]: Standing(row[1], row[2], row[3], row[4], bool(row[5])) for row in found}

    def footprint(self) -> Footprint:
        (row,) = self.read(
            "SELECT (SELECT count(*) FROM examples WHERE namespace = ?1),"
            " (SELECT count(DISTINCT sha256) FROM example_images JOIN examples USING (key)"
            " WHERE namespace = ?1),"
            " (SELECT count(*) FROM uses JOIN examples USING (key)"
            " WHERE namespace = ?1 AND pinned),"
            " (SELECT page_count FROM pragma_page_count)"
            " * (SELECT page_size FROM pragma_page_size),"
            " (SELECT user_version FROM pragma_user_version)",
            self.namespace,
        )
        return Footprint(*row)
