"""Read access to a knowledge base in PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from bottega._util.identity import Exclude, query_digests
from bottega.image import Image
from bottega.knowledge.filters import Filter
from bottega.knowledge.postgres.database import KnowledgeDatabase
from bottega.knowledge.postgres.filters import LABELS, Parameters, to_condition
from bottega.knowledge.postgres.schema import KNOWLEDGE_BASE, vectors_table
from bottega.knowledge.records import Footprint, RowMetadata, StoredView, from_row
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query

# One statement: another process may delete an example between two.
SELECT_EXAMPLES = (
    "SELECT examples.*, image.sha256, data, media_type, width, height, shown.source AS shown_source"
    " FROM unnest($1::bigint[]) WITH ORDINALITY AS chosen (key, ordinal)"
    " JOIN kb_examples AS examples USING (key)"
    " LEFT JOIN kb_example_images AS shown USING (key)"
    " LEFT JOIN kb_images AS image ON image.sha256 = shown.sha256"
    " ORDER BY chosen.ordinal, position"
)
VIEWS = "SELECT number, name, fingerprint, dimension FROM kb_views WHERE complete ORDER BY number"


class PostgresReader(KnowledgeDatabase):
    """Reader of the examples of one namespace."""

    def __init__(self, url: str, namespace: str = "", *, create: bool = True) -> None:
        super().__init__(url, create=create)
        self.namespace = namespace

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        found = self.by_keys(self.keys(ids).values())
        return {str(example.id): example for example in found.values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        rows: dict[int, Any] = {}
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for row in self.read(SELECT_EXAMPLES, list(keys)):
            rows[row["key"]] = row
            if row["sha256"] is not None:
                images[row["key"]].append(
                    Image(
                        *(row["data"], row["media_type"], row["sha256"]),
                        *(row["width"], row["height"], row["shown_source"]),
                    )
                )
        return {key: from_row(row, images[key]) for key, row in rows.items()}

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            "SELECT id, key FROM kb_examples WHERE namespace = $1 AND id = ANY($2::text[])",
            self.namespace,
            list(ids),
        )
        return {row["id"]: row["key"] for row in found}

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]:
        found = self.read(
            "SELECT question_digest, id FROM kb_examples JOIN kb_uses USING (key)"
            " WHERE namespace = $1 AND question_digest = ANY($2::text[]) AND pinned",
            self.namespace,
            list(question_digests),
        )
        return {row["question_digest"]: row["id"] for row in found}

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]:
        parameters = Parameters()
        excluded = self.excluded(query, exclude, parameters)
        return {row["key"] for row in self.read(excluded, *parameters.values)}

    def excluded(self, query: Query, exclude: Exclude, parameters: Parameters) -> str:
        """Return the statement that selects the excluded keys, and add its values."""
        namespace = parameters.add(self.namespace, "text")
        own = parameters.add(query.id, "text")
        by_id = f"SELECT key FROM kb_examples WHERE namespace = {namespace} AND id = {own}"
        if exclude == "same-question":
            digests = parameters.add(sorted(query_digests(query)), "text[]")
            return (
                f"{by_id} UNION SELECT key FROM kb_examples WHERE namespace = {namespace}"
                f" AND question_digest = ANY({digests})"
            )
        hashes = parameters.add(sorted({image.sha256 for image in query.images}), "text[]")
        return f"{by_id} UNION SELECT key FROM kb_example_images WHERE sha256 = ANY({hashes})"

    def same_image_keys(self, keys: Collection[int]) -> dict[int, set[int]]:
        found = self.read(
            "SELECT own.key AS own, other.key AS other FROM kb_example_images AS own"
            " JOIN kb_example_images AS other USING (sha256) WHERE own.key = ANY($1::bigint[])",
            list(keys),
        )
        same = {key: {key} for key in keys}
        for row in found:
            same[row["own"]].add(row["other"])
        return same

    def ids_where(self, where: Filter | None = None) -> list[str]:
        parameters = Parameters(self.namespace)
        condition = "true" if where is None else to_condition(where, parameters)
        found = self.read(
            "SELECT id FROM kb_examples AS examples WHERE namespace = $1"
            f" AND {condition} ORDER BY key",
            *parameters.values,
        )
        return [row["id"] for row in found]

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        found = self.read(
            "SELECT id FROM kb_examples WHERE namespace = $1 AND id >= $2 AND id < $3"
            " ORDER BY id LIMIT $4",
            *(self.namespace, prefix, prefix + "g", limit),  # "g" follows the last digit
        )
        return [row["id"] for row in found]

    def count(self) -> int:
        counted = "SELECT count(*) AS n FROM kb_examples WHERE namespace = $1"
        return int(self.read(counted, self.namespace)[0]["n"])

    def labels(self) -> dict[str, list[str]]:
        found = self.read(
            f"SELECT label.value, id FROM kb_examples AS examples, {LABELS}"
            " WITH ORDINALITY AS label (value, ordinal) WHERE namespace = $1"
            " ORDER BY key, label.ordinal",
            self.namespace,
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in found:
            ids[row["value"]].append(row["id"])
        return dict(ids)

    def is_multi_label(self) -> bool:
        found = self.read(
            "SELECT EXISTS (SELECT 1 FROM kb_examples WHERE namespace = $1"
            " AND labels IS NOT NULL AND jsonb_array_length(labels) != 1) AS found",
            self.namespace,
        )
        return bool(found[0]["found"])

    def contradictions(self) -> list[list[str]]:
        found = self.read(
            "SELECT array_agg(id ORDER BY key) AS ids FROM kb_examples WHERE namespace = $1"
            " GROUP BY question_digest HAVING count(DISTINCT answer) > 1 ORDER BY min(key)",
            self.namespace,
        )
        return [list(row["ids"]) for row in found]

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        found = self.read(
            "SELECT data, media_type, sha256, width, height FROM kb_images AS image"
            " WHERE sha256 = ANY($2::text[]) AND EXISTS (SELECT 1 FROM kb_example_images AS shown"
            " JOIN kb_examples USING (key) WHERE shown.sha256 = image.sha256 AND namespace = $1)",
            self.namespace,
            list(sha256s),
        )
        return {row["sha256"]: Image(*row) for row in found}

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM kb_notes WHERE name = $1", name)
        return str(found[0]["value"]) if found else None

    def namespaces(self) -> dict[str, int]:
        counted = (
            "SELECT namespace, count(*) AS n FROM kb_examples GROUP BY namespace ORDER BY namespace"
        )
        return {row["namespace"]: row["n"] for row in self.read(counted)}

    def metadata_by_id(self, keys: Collection[int]) -> dict[int, RowMetadata]:
        found = self.read(
            "SELECT key, created, coalesce(count, 0), last_used, coalesce(saved_usd, 0),"
            " coalesce(pinned, false) FROM kb_examples LEFT JOIN kb_uses USING (key)"
            " WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row[0]: RowMetadata(*list(row)[1:]) for row in found}

    def footprint(self) -> Footprint:
        [row] = self.read(
            "SELECT (SELECT count(*) FROM kb_examples WHERE namespace = $1),"
            " (SELECT count(DISTINCT sha256) FROM kb_example_images JOIN kb_examples USING (key)"
            " WHERE namespace = $1),"
            " (SELECT count(*) FROM kb_uses JOIN kb_examples USING (key)"
            " WHERE namespace = $1 AND pinned),"
            " (SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
            " WHERE relkind = 'r' AND relname LIKE 'kb\\_%')",
            self.namespace,
        )
        examples, images, pinned, size = row
        return Footprint(examples, images, pinned, size, KNOWLEDGE_BASE.version)

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]:
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM kb_examples AS kept"
            " WHERE kept.key = kb_changes.key) AS deleted"
            " FROM kb_changes WHERE namespace = $1 AND seq > $2 ORDER BY seq LIMIT $3",
            *(self.namespace, seq, limit),
        )
        return [ExampleChange(row["seq"], row["id"], row["deleted"]) for row in found]

    def last_seq(self) -> int:
        newest = "SELECT coalesce(max(seq), 0) AS seq FROM kb_changes WHERE namespace = $1"
        return int(self.read(newest, self.namespace)[0]["seq"])

    def pruned(self) -> int:
        found = self.read("SELECT seq FROM kb_pruned WHERE namespace = $1", self.namespace)
        return int(found[0]["seq"]) if found else 0

    def views(self) -> dict[str, StoredView]:
        return {row["name"]: StoredView(*row) for row in self.read(VIEWS)}

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM {vectors_table(view)} WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row["key"]: row["vector"] for row in found}

    def vectors_of_images(self, sha256s: Collection[str], view: int) -> dict[str, Vectors]:
        found = self.read(
            f"SELECT shown.sha256, vector FROM kb_example_images AS shown"
            f" JOIN {vectors_table(view)} USING (key)"
            " WHERE shown.sha256 = ANY($1::text[]) AND NOT EXISTS"
            " (SELECT 1 FROM kb_example_images AS o WHERE o.key = shown.key AND o.position > 0)",
            list(sha256s),
        )
        return {row["sha256"]: row["vector"] for row in found}

    def count_vectors(self, number: int) -> int:
        return int(self.read(f"SELECT count(*) AS n FROM {vectors_table(number)}")[0]["n"])

    def missing_keys(self, number: int) -> list[int]:
        return [
            row["key"] for row in self.read(f"SELECT key {without_vector(number)} ORDER BY key")
        ]

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if it is missing."""
        found = self.read(
            "SELECT key, vector FROM kb_examples"
            f" LEFT JOIN {vectors_table(view.number)} USING (key) WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row["key"]: row["vector"] for row in found}

    def ids_of(self, keys: Sequence[int]) -> list[str]:
        chosen = "SELECT id FROM kb_examples WHERE key = ANY($1::bigint[]) ORDER BY key"
        return [row["id"] for row in self.read(chosen, list(keys))]

    def sizes(self) -> tuple[int, int, int]:
        examples, images = (
            int(self.read(f"SELECT count(*) AS n FROM {table}")[0]["n"])
            for table in ("kb_examples", "kb_images")
        )
        vectors = sum(self.count_vectors(view.number) for view in self.views().values())
        return examples, images, vectors

    def all_keys(self, after: int, limit: int) -> list[int]:
        chosen = "SELECT key FROM kb_examples WHERE key > $1 ORDER BY key LIMIT $2"
        return [row["key"] for row in self.read(chosen, after, limit)]


def without_vector(number: int) -> str:
    return (
        "FROM kb_examples WHERE NOT EXISTS (SELECT 1 FROM"
        f" {vectors_table(number)} AS vectors WHERE vectors.key = kb_examples.key)"
    )
