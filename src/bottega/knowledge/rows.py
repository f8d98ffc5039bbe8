"""Examples in one SQLite file: the truth from which indexes are derived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from bottega.exclusion import Exclude
from bottega.image import Image
from bottega.knowledge import writing
from bottega.knowledge.change_log import ChangeLog
from bottega.knowledge.database import LISTED, listed
from bottega.knowledge.filters import LABELS, Filter, condition
from bottega.knowledge.ports import (
    Capacity,
    Embedded,
    Footprint,
    StoredView,
    Use,
)
from bottega.knowledge.pruning import prune
from bottega.knowledge.records import Standing, from_row, query_digests, text_of
from bottega.types import Example, Query

LISTED_THIRD = "(SELECT value FROM json_each(?3))"
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


class SqliteRows(ChangeLog):
    """The rows of one namespace; those of the others are as if they were not there."""

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, Embedded],
        capacity: Capacity | None = None,
        standings: Mapping[str, Standing] | None = None,
        supersede: bool = False,
    ) -> int:
        with self.transaction() as connection:
            numbers = writing.claim(connection, views)
            new = 0
            for example, *vectors in zip(
                examples, *(made.vectors for made in views.values()), strict=True
            ):
                if supersede and writing.has_pinned_answer(connection, self.namespace, example):
                    continue
                by_number = dict(zip(numbers, vectors, strict=True))
                key = writing.insert(connection, example, by_number, self.namespace)
                new += key is not None
                standing = (standings or {}).get(example.id or "")
                if key is not None and standing is not None:
                    writing.stand(connection, key, standing)
                if key is not None and supersede:
                    writing.supersede(connection, self.namespace, key)
            if new and capacity is not None:
                writing.make_room(connection, self.namespace, capacity)
            if new:
                prune(connection, new)
            return new

    def annotate(self, id: str, told: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        with self.transaction() as connection, self.understood():
            done = writing.annotate(connection, self.namespace, id, told, tags)
            prune(connection, int(done))
            return done

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

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        found = self.read(
            "SELECT data, media_type, sha256, width, height FROM images"
            f" WHERE sha256 IN {LISTED} AND EXISTS (SELECT 1 FROM example_images AS shown"
            " JOIN examples USING (key)"
            " WHERE shown.sha256 = images.sha256 AND namespace = ?)",
            listed(sha256s),
            self.namespace,
        )
        return {row["sha256"]: Image(*row) for row in found}

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            f"SELECT id, key FROM examples WHERE namespace = ? AND id IN {LISTED}",
            self.namespace,
            listed(ids),
        )
        return {row["id"]: row["key"] for row in found}

    def pinned_answers(self, asked: Collection[str]) -> dict[str, str]:
        found = self.read(writing.PINNED_ANSWERS, self.namespace, listed(asked))
        return {row["question_digest"]: row["id"] for row in found}

    def own_keys(self, query: Query, exclude: Exclude) -> set[int]:
        own_id = "SELECT key FROM examples WHERE namespace = ?1 AND id = ?2"
        if exclude == "same-question":
            same_question = f"namespace = ?1 AND question_digest IN {LISTED_THIRD}"
            either = f"{own_id} UNION SELECT key FROM examples WHERE {same_question}"
            wanted = listed(query_digests(query))
            found = self.read(either, self.namespace, query.id, wanted)
        elif query.images or query.id is not None:
            same_image = f"SELECT key FROM example_images WHERE sha256 IN {LISTED_THIRD}"
            wanted = listed({image.sha256 for image in query.images})
            found = self.read(f"{own_id} UNION {same_image}", self.namespace, query.id, wanted)
        else:
            return set()
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
        with self.understood():
            return text_of(found[0][0]) if found else None

    def set_note(self, name: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def views(self) -> dict[str, StoredView]:
        return {row["name"]: StoredView(*row) for row in self.read(writing.COMPLETE_VIEWS)}

    def add_uses(self, uses: Mapping[str, Use]) -> None:
        with self.transaction() as connection:
            writing.add_uses(connection, self.namespace, uses)

    def pin(self, ids: Collection[str], pinned: bool) -> int:
        with self.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO uses (key, pinned)"
                " SELECT key, ? FROM examples LEFT JOIN uses USING (key)"
                f" WHERE namespace = ? AND id IN {LISTED} AND coalesce(pinned, 0) != ?"
                " ON CONFLICT (key) DO UPDATE SET pinned = excluded.pinned",
                (pinned, self.namespace, listed(ids), pinned),
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
