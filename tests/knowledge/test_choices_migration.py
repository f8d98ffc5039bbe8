"""A file of format 5, written by the version before choices were part of an example's identity.

`data/format-5.db.gz` holds two namespaces, two views, rationale, labels, tags, a pin, counters, an
annotated row, a deleted row, and a row without a question digest (as format 4 left them).
"""

from __future__ import annotations

import gzip
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bottega._util.identity import identity, question_digest
from bottega.errors import StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.base import HNSW_ABOVE
from bottega.knowledge.schema import KNOWLEDGE_BASE
from bottega.types import Example, Query
from tests.knowledge.doubles import SeededEmbedder

STORED = Path(__file__).parent / "data" / "format-5.db.gz"
VIEWS = {
    "default": View(SeededEmbedder()),
    "text": View(SeededEmbedder("seeded-text"), lambda example: Query(example.query.text)),
}
OLD_IDS = "SELECT key, id, choices FROM examples ORDER BY key"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "kb.db"
    path.write_bytes(gzip.decompress(STORED.read_bytes()))
    return path


def opened(path: Path, namespace: str = "", hnsw_above: int = HNSW_ABOVE) -> KnowledgeBase:
    return KnowledgeBase.open(path, VIEWS, namespace=namespace, hnsw_above=hnsw_above)


def read(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    found = connection.execute(statement).fetchall()
    connection.close()
    return found


def by_question(kb: KnowledgeBase) -> dict[tuple[str, tuple[str, ...]], Example]:
    return {(example.query.text, example.query.choices): example for example in kb}


def test_migrated_ids_equal_new_ids(old: Path) -> None:
    before = {key: id for key, id, _ in read(old, OLD_IDS)}
    for namespace, count in (("", 6), ("team", 2)):
        with opened(old, namespace) as kb:
            assert len(kb) == count
            assert [identity(example) for example in kb] == kb.ids()
    for key, id, choices in read(old, OLD_IDS):
        assert (id == before[key]) == (choices == "[]")
    digests = "SELECT count(*) FROM examples WHERE question_digest IS NULL"
    assert read(old, digests) == [(0,)]


def test_nothing_is_lost(old: Path) -> None:
    tables = ("images", "example_images", "uses", "views", "notes")
    kept = [
        *(f"SELECT * FROM {table}" for table in tables),
        "SELECT key, view, vector FROM vectors",
    ]
    before = [read(old, statement) for statement in kept]
    rest = "SELECT key, question, answer, choices, labels, rationale, tags, source, created,"
    rest += " namespace FROM examples"
    rows = read(old, rest)
    with opened(old) as kb:
        assert kb.verify(deep=True).problems == ()
        found = by_question(kb)
        coloured = found["Which colour?", ("red", "blue")]
        assert (coloured.rationale, coloured.tags) == ("It is red.", {"hue": "warm"})
        assert kb.metadata(str(coloured.id)).saved_usd == 0.5
        assert kb.metadata(str(found["Capital of France?", ("Paris", "Rome")].id)).pinned
        assert found["Which apply?", ("a", "b", "c")].labels == ("b", "c")
    assert [read(old, statement) for statement in kept] == before
    assert read(old, rest) == rows


def test_searches_find_every_row(old: Path) -> None:
    for exact_up_to in (3, 100):
        with opened(old, hnsw_above=exact_up_to) as kb:
            kb.wait_for_indexes()
            for example in kb:
                (best,) = kb.search(example.query, 1, include_self=True, within=[str(example.id)])
                assert best.example == example
                assert best.score == pytest.approx(1.0)


def test_replace_respects_choices(old: Path) -> None:
    with opened(old) as kb:
        migrated = by_question(kb)
        for choices, answer in ((("red", "blue"), "blue"), (("up", "down"), "up")):
            query = migrated["Which colour?", ("red", "blue")].query
            kb.replace([Example(replace(query, choices=choices, id=None), answer)])
        answers = {choices: one.answer for (_, choices), one in by_question(kb).items()}
        assert answers["red", "blue"] == "blue"
        assert answers["green", "grey"] == "green"
        assert answers["up", "down"] == "up"


def test_changes_report_the_new_ids(old: Path) -> None:
    before = {str(id) for _, id, _ in read(old, "SELECT key, id, 0 FROM examples")}
    (last,) = read(old, "SELECT max(seq) FROM changes")[0]
    with opened(old) as kb:
        there = set[str]()
        for change in kb.changes():
            (there.discard if change.deleted else there.add)(change.id)
        assert there == set(kb.ids())
        late = {change.id: change.deleted for change in kb.changes(int(str(last)))}
        assert {id for id, deleted in late.items() if deleted} <= before
        assert {id for id, deleted in late.items() if not deleted} == there - before


def test_file_is_migrated_once(old: Path) -> None:
    opened(old).close()
    version, last = (read(old, f"SELECT {what}")[0] for what in VERSION_AND_LAST)
    assert version == (KNOWLEDGE_BASE.version,)
    opened(old).close()
    assert read(old, f"SELECT {VERSION_AND_LAST[1]}")[0] == last


VERSION_AND_LAST = ("user_version FROM pragma_user_version", "max(seq) FROM changes")


def test_damaged_rows_are_kept_and_reported(old: Path) -> None:
    connection = sqlite3.connect(old)
    damaged_image = ("answer = 'other'", "choices = x'ff'", "question = CAST(x'ff41' AS TEXT)")
    for key, change in enumerate(damaged_image, 1):
        connection.execute(f"UPDATE examples SET {change} WHERE key = {key + (key == 3)}")
    connection.execute("UPDATE examples SET tags = '[]' WHERE key = 8")
    connection.commit()
    before = connection.execute(OLD_IDS.replace("choices", "0")).fetchall()
    connection.close()
    with opened(old) as kb:
        problems = [problem.what for problem in kb.verify().problems]
    assert any("example 33eec8be4d3ad8b2 has another question" in what for what in problems)
    assert sum("cannot be read" in what for what in problems) == 3
    after = read(old, OLD_IDS.replace("choices", "0"))
    assert [one for one in after if one in before] == [one for one in before if one[0] != 10]


KILLED = """
import os, sys
from bottega.knowledge import schema
from bottega.knowledge.schema import KNOWLEDGE_BASE
import sqlite3
done = []
def digest(*parts):
    done.append(parts)
    if len(done) == 6:
        os._exit(9)
    return real(*parts)
real, schema.json_digest = schema.json_digest, digest
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
KNOWLEDGE_BASE.migrate(connection, "kb")
"""


def test_killed_migration_changes_nothing(old: Path) -> None:
    before = read(old, OLD_IDS)
    done = subprocess.run([sys.executable, "-c", KILLED, str(old)], env=os.environ, timeout=60)
    assert done.returncode == 9
    assert (read(old, OLD_IDS), read(old, "SELECT * FROM pragma_user_version")) == (before, [(5,)])
    with opened(old) as kb:
        assert [identity(example) for example in kb] == kb.ids()
        assert kb.verify().problems == ()


def test_older_version_rejects_the_newer_file(old: Path) -> None:
    opened(old).close()
    older = replace(KNOWLEDGE_BASE, migrations=KNOWLEDGE_BASE.migrations[:5])
    connection = sqlite3.connect(old, isolation_level=None)
    with pytest.raises(StoreError, match=r"has format \d+; this version of bottega reads up to 5"):
        older.migrate(connection, "kb.db")
    connection.close()


def test_older_open_process_cannot_write_old_ids(old: Path) -> None:
    connection = sqlite3.connect(old, isolation_level=None)
    connection.execute("SELECT count(*) FROM examples").fetchone()
    opened(old).close()
    with pytest.raises(sqlite3.OperationalError, match="asked"):
        connection.execute("INSERT INTO examples (id, asked) VALUES ('x', 'y')")
    connection.close()


def test_read_only_old_file_has_a_hint(old: Path) -> None:
    connection = sqlite3.connect(f"file:{old}?mode=ro", uri=True, isolation_level=None)
    with pytest.raises(StoreError, match="must be migrated to format") as caught:
        KNOWLEDGE_BASE.migrate(connection, "kb.db")
    assert "open it, or a copy, once where it is writable" in caught.value.hint
    connection.close()
    assert read(old, "SELECT * FROM pragma_user_version") == [(5,)]


def test_migrated_digest_equals_a_new_one(old: Path) -> None:
    with opened(old) as kb:
        stored = set(read(old, "SELECT id, question_digest FROM examples"))
        assert {(one.id, question_digest(one)) for one in kb} <= stored
