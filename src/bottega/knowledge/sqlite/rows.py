"""Examples in one SQLite file; search indexes are derived from these rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from bottega._util.identity import Exclude, query_digests
from bottega.image import Image
from bottega.knowledge.eviction import Capacity, evict_excess, prune
from bottega.knowledge.filters import LABELS, Filter, to_sql
from bottega.knowledge.reader import check_known
from bottega.knowledge.records import (
    EmbeddedBatch,
    Footprint,
    RowMetadata,
    StoredView,
    UsageRecord,
    from_row,
    storable_text,
)
from bottega.knowledge.sqlite.database import (
    COMPLETE_VIEWS,
    IN_JSON,
    PINNED_IDS,
    annotate_row,
    claim_views,
    has_pinned_answer,
    insert_row,
    json_array,
    remove_answers,
    remove_rows,
    set_metadata,
)
from bottega.knowledge.sqlite.view_rows import ViewRows
from bottega.types import Example, Query

LISTED_THIRD = "(SELECT value FROM json_each(?3))"
# CROSS JOIN fixes the join order: SQLite walks the list and looks up each key.
SELECT_EXAMPLES = (
    "SELECT examples.* FROM json_each(?) AS chosen CROSS JOIN examples"
    " ON examples.key = chosen.value"
)
SELECT_IMAGES = (
    "SELECT shown.key, data, media_type, sha256, width, height, source"
    " FROM json_each(?) AS chosen CROSS JOIN example_images AS shown ON shown.key = chosen.value"
    " CROSS JOIN images USING (sha256) ORDER BY shown.key, position"
)


class SqliteRows(ViewRows):
    """Durable examples of one namespace of a file; the rows of other namespaces are hidden.

    A write that has returned survives a crash. Methods are safe to call from several threads while
    other processes write to the same file.
    """

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
        pin: bool = False,
    ) -> int:
        """Store the examples with new ids in one transaction and return their number.

        `metadata_by_id` sets age, pin and counters before eviction. With `supersede`, each example
        replaces older answers to the same question; it is skipped if one of those is pinned, unless
        `pin`: then it replaces those, too, and is pinned. Raises `EmbedderMismatchError` if the
        stored vectors have another fingerprint.
        """
        with self.transaction() as connection:
            numbers = claim_views(connection, views)
            new = 0
            for example, *vectors in zip(
                examples, *(made.vectors for made in views.values()), strict=True
            ):
                if supersede:
                    if not pin and has_pinned_answer(connection, self.namespace, example):
                        continue
                    remove_answers(connection, self.namespace, example)
                by_number = dict(zip(numbers, vectors, strict=True))
                key = insert_row(connection, example, by_number, self.namespace)
                if key is None:
                    continue
                new += 1
                metadata = (metadata_by_id or {}).get(example.id or "")
                if metadata is not None:
                    set_metadata(connection, key, metadata)
                if pin:
                    connection.execute("INSERT INTO uses (key, pinned) VALUES (?, 1)", [key])
            # Evicted before the commit: no reader sees more rows than the capacity.
            if new:
                if capacity is not None:
                    evict_excess(connection, self.namespace, capacity)
                prune(connection, new)
            return new

    def annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """Set these fields and add these tags. Return False if the id does not exist.

        The row gets a new key, because the content of a key never changes; vectors, uses and age
        stay.
        """
        with self.transaction() as connection, self.decoding():
            done = annotate_row(connection, self.namespace, id, fields, tags)
            prune(connection, int(done))
            return done

    def delete(self, ids: Collection[str]) -> int:
        with self.transaction() as connection:
            found = connection.execute(
                f"SELECT key FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
                (self.namespace, json_array(ids)),
            )
            keys = [row[0] for row in found]
            remove_rows(connection, keys)
            return len(keys)

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        # One snapshot for both reads: another process may delete an example in between.
        with self.snapshot():
            found = self.by_keys(self.keys(ids).values())
        return {str(example.id): example for example in found.values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        chosen = json_array(keys)
        with self.snapshot():
            rows = self.read(SELECT_EXAMPLES, chosen)
            image_rows = self.read(SELECT_IMAGES, chosen)
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for key, *fields in image_rows:
            images[key].append(Image(*fields))
        with self.decoding():
            return {row["key"]: from_row(row, images[row["key"]]) for row in rows}

    def same_image_keys(self, keys: Collection[int]) -> dict[int, set[int]]:
        """Return for each key itself and the keys of the rows that share an image with it."""
        found = self.read(
            "SELECT own.key, other.key FROM example_images AS own"
            f" JOIN example_images AS other USING (sha256) WHERE own.key IN {IN_JSON}",
            json_array(keys),
        )
        same = {key: {key} for key in keys}
        for key, other in found:
            same[key].add(other)
        return same

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            f"SELECT id, key FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
            self.namespace,
            json_array(ids),
        )
        return {row["id"]: row["key"] for row in found}

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]:
        """Return the ids of pinned examples by question digest."""
        found = self.read(PINNED_IDS, self.namespace, json_array(question_digests))
        return {row["question_digest"]: row["id"] for row in found}

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]:
        """Return the keys of the rows that `exclude` rules out: the query's own id, and rows that
        share an image with it or are the same question."""
        own_id = "SELECT key FROM examples WHERE namespace = ?1 AND id = ?2"
        if exclude == "same-question":
            same_question = f"namespace = ?1 AND question_digest IN {LISTED_THIRD}"
            either = f"{own_id} UNION SELECT key FROM examples WHERE {same_question}"
            wanted = json_array(query_digests(query))
            found = self.read(either, self.namespace, query.id, wanted)
        elif query.images or query.id is not None:
            same_image = f"SELECT key FROM example_images WHERE sha256 IN {LISTED_THIRD}"
            wanted = json_array({image.sha256 for image in query.images})
            found = self.read(f"{own_id} UNION {same_image}", self.namespace, query.id, wanted)
        else:
            return set()
        return {row[0] for row in found}

    def ids_where(self, where: Filter | None = None) -> list[str]:
        """Return the ids that match, in insertion order."""
        text, values = ("true", []) if where is None else to_sql(where)
        found = self.read(
            f"SELECT id FROM examples WHERE namespace = ? AND {text} ORDER BY examples.key",
            self.namespace,
            *values,
        )
        return [row[0] for row in found]

    def keys_where(self, where: Filter, after: int = 0) -> list[int]:
        """Return the keys above `after` that match, ascending."""
        text, values = to_sql(where)
        found = self.read(
            "SELECT examples.key FROM examples WHERE namespace = ? AND examples.key > ?"
            f" AND {text} ORDER BY examples.key",
            self.namespace,
            after,
            *values,
        )
        return [row[0] for row in found]

    def last_key(self) -> int:
        """Return the highest key of any namespace."""
        return int(self.read("SELECT coalesce(max(key), 0) FROM examples")[0][0])

    def count(self) -> int:
        found = self.read("SELECT count(*) FROM examples WHERE namespace = ?", self.namespace)
        return int(found[0][0])

    def labels(self) -> dict[str, list[str]]:
        """Return the ids of each label, with labels in order of first appearance."""
        found = self.read(
            f"SELECT label.value, examples.id FROM examples, {LABELS} AS label"
            " WHERE namespace = ? ORDER BY examples.key, label.key",
            self.namespace,
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for label, id_ in found:
            ids[label].append(id_)
        return dict(ids)

    def views(self) -> dict[str, StoredView]:
        """Return the complete views by name, in order of creation."""
        return {row["name"]: StoredView(*row) for row in self.read(COMPLETE_VIEWS)}

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None:
        """Add to the counters; deleted examples are ignored."""
        with self.transaction() as connection:
            connection.executemany(
                "INSERT INTO uses (key, count, last_used, saved_usd)"
                " SELECT key, ?, ?, ? FROM examples WHERE namespace = ? AND id = ?"
                " ON CONFLICT (key) DO UPDATE SET count = count + excluded.count,"
                " last_used = max(coalesce(last_used, 0), excluded.last_used),"
                " saved_usd = saved_usd + excluded.saved_usd",
                [
                    (use.count, use.last_used, use.saved_usd, self.namespace, id)
                    for id, use in uses.items()
                ],
            )

    def pin(self, ids: Collection[str], pinned: bool) -> int:
        with self.transaction() as connection:
            found = connection.execute(
                f"SELECT id FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
                (self.namespace, json_array(ids)),
            )
            check_known(ids, {row[0] for row in found})
            cursor = connection.execute(
                "INSERT INTO uses (key, pinned)"
                " SELECT key, ? FROM examples LEFT JOIN uses USING (key)"
                f" WHERE namespace = ? AND id IN {IN_JSON} AND coalesce(pinned, 0) != ?"
                " ON CONFLICT (key) DO UPDATE SET pinned = excluded.pinned",
                (pinned, self.namespace, json_array(ids), pinned),
            )
            return cursor.rowcount

    def metadata_by_id(self, keys: Collection[int]) -> dict[int, RowMetadata]:
        found = self.read(
            "SELECT examples.key, created, coalesce(count, 0), last_used, coalesce(saved_usd, 0),"
            " coalesce(pinned, 0) FROM json_each(?) AS chosen CROSS JOIN examples"
            " ON examples.key = chosen.value LEFT JOIN uses ON uses.key = examples.key",
            json_array(keys),
        )
        return {row[0]: RowMetadata(row[1], row[2], row[3], row[4], bool(row[5])) for row in found}

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

    def all_keys(self, after: int, limit: int) -> list[int]:
        chosen = "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"
        return [row[0] for row in self.read(chosen, after, limit)]

    def ids_of(self, keys: Sequence[int]) -> list[str]:
        chosen = f"SELECT id FROM examples WHERE key IN {IN_JSON} ORDER BY key"
        return [str(row[0]) for row in self.read(chosen, json_array(keys))]

    def sizes(self) -> tuple[int, int, int]:
        examples, images, vectors = (
            int(self.read(f"SELECT count(*) FROM {table}")[0][0])
            for table in ("examples", "images", "vectors")
        )
        return examples, images, vectors

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        found = self.read(
            "SELECT data, media_type, sha256, width, height FROM images"
            f" WHERE sha256 IN {IN_JSON} AND EXISTS (SELECT 1 FROM example_images AS shown"
            " JOIN examples USING (key)"
            " WHERE shown.sha256 = images.sha256 AND namespace = ?)",
            json_array(sha256s),
            self.namespace,
        )
        return {row["sha256"]: Image(*row) for row in found}

    def is_multi_label(self) -> bool:
        (row,) = self.read(
            "SELECT EXISTS (SELECT 1 FROM examples WHERE namespace = ?"
            " AND labels IS NOT NULL AND json_array_length(labels) != 1)",
            self.namespace,
        )
        return bool(row[0])

    def contradictions(self) -> list[list[str]]:
        found = self.read(
            "SELECT group_concat(id, ' ') FROM examples WHERE namespace = ?"
            " GROUP BY question_digest HAVING count(DISTINCT answer) > 1 ORDER BY min(key)",
            self.namespace,
        )
        return [str(row[0]).split() for row in found]

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM notes WHERE name = ?", name)
        with self.decoding():
            return storable_text(found[0][0]) if found else None

    def set_note(self, name: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def namespaces(self) -> dict[str, int]:
        counted = "SELECT namespace, count(*) FROM examples GROUP BY namespace ORDER BY namespace"
        return {row[0]: row[1] for row in self.read(counted)}

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        found = self.read(
            "SELECT id FROM examples WHERE namespace = ? AND id >= ? AND id < ?"
            " ORDER BY id LIMIT ?",
            self.namespace,
            prefix,
            prefix + "g",  # "g" follows the last hexadecimal digit
            limit,
        )
        return [row[0] for row in found]
