"""Formats of files and tables, with an invented kind that has a second version."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bottega._util.postgres import PostgresKind, PostgresPool
from bottega._util.sqlite import FileKind
from bottega.errors import StoreError, StoreReadOnlyError

TABLES = """
CREATE TABLE notes (
    number INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);
CREATE INDEX notes_by_text ON notes (text);
"""
SECOND = """
ALTER TABLE notes ADD COLUMN length INTEGER NOT NULL DEFAULT 0;
UPDATE notes SET length = length(text);
CREATE TRIGGER set_length AFTER INSERT ON notes BEGIN
    UPDATE notes SET length = length(text) WHERE number = NEW.number;
END;
"""
FIRST_FILE = FileKind("notebook", (TABLES,), application_id=0x6E6F7465)
SECOND_FILE = replace(FIRST_FILE, migrations=(TABLES, SECOND))
FIRST_TABLES = PostgresKind("notebook", (TABLES,))
SECOND_TABLES = replace(
    FIRST_TABLES, migrations=(TABLES, "ALTER TABLE notes ADD length integer NOT NULL DEFAULT 1;")
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of the first version with one row."""
    path = tmp_path / "notebook.db"
    with closing(FIRST_FILE.open(path, busy_seconds=1)) as connection:
        connection.execute("INSERT INTO notes VALUES (1, 'bread')")
    return path


def read(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def state(path: Path) -> tuple[object, ...]:
    """Return version, hash and rows."""
    statement = "SELECT user_version, digest FROM pragma_user_version, bottega_schema"
    return *read(path, statement)[0], read(path, "SELECT * FROM notes")


def test_migrated_file_has_its_rows_and_the_new_digest(path: Path) -> None:
    assert state(path) == (1, FIRST_FILE.digest(1), [(1, "bread")])
    for _ in range(2):
        SECOND_FILE.open(path, busy_seconds=1).close()
        assert state(path) == (2, SECOND_FILE.digest(2), [(1, "bread", 5)])
    assert FIRST_FILE.digest(1) == SECOND_FILE.digest(1) != SECOND_FILE.digest(2)


def test_new_and_migrated_files_are_equal(path: Path, tmp_path: Path) -> None:
    SECOND_FILE.open(path, busy_seconds=1).close()
    SECOND_FILE.open(tmp_path / "new.db", busy_seconds=1).close()
    tables = "SELECT type, name, sql FROM sqlite_schema ORDER BY name"
    assert read(path, tables) == read(tmp_path / "new.db", tables)


OPENER = """
import sys
from pathlib import Path
from tests._util.test_store_kind import SECOND_FILE
print("ready", flush=True)
sys.stdin.readline()
connection = SECOND_FILE.open(Path(sys.argv[1]), busy_seconds=20)
connection.execute("INSERT INTO notes (text) VALUES ('salt')")
"""


@pytest.mark.parametrize("is_new", [False, True])
def test_two_processes_migrate_at_once(path: Path, is_new: bool) -> None:
    if is_new:
        path = path.with_name("new.db")
    command = [sys.executable, "-c", OPENER, str(path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in "12"]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    rows = [("salt", 4), ("salt", 4)] if is_new else [("bread", 5), ("salt", 4), ("salt", 4)]
    assert state(path)[:2] == (2, SECOND_FILE.digest(2))
    assert read(path, "SELECT text, length FROM notes ORDER BY number") == rows


def test_read_only_file_of_an_older_version_is_refused(path: Path) -> None:
    before = path.read_bytes()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        FIRST_FILE.migrate(connection, "notebook.db")
        with pytest.raises(StoreError, match="must be migrated to format 2, but") as caught:
            SECOND_FILE.migrate(connection, "notebook.db")
    assert caught.value.hint == "open it, or a copy, once where it is writable"
    assert path.read_bytes() == before


def test_failed_migration_changes_nothing(path: Path) -> None:
    before = state(path)
    broken = replace(FIRST_FILE, migrations=(TABLES, f"{SECOND}; INSERT INTO tags VALUES (1)"))
    with pytest.raises(sqlite3.OperationalError, match="no such table: tags"):
        broken.open(path, busy_seconds=1)
    assert state(path) == before


def test_file_of_another_schema_is_not_migrated(path: Path) -> None:
    before = path.read_bytes()
    other = replace(SECOND_FILE, migrations=(TABLES.replace("text", "words"), SECOND))
    with pytest.raises(StoreError) as caught:
        other.open(path, busy_seconds=1)
    assert str(caught.value) == (
        f"{path} has schema {FIRST_FILE.digest(1)} of notebook format 1; this version of bottega"
        f" reads schema {other.digest(1)}"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "same",
    [
        " ".join(TABLES.split()),
        TABLES.replace("\n", "\n\t  "),
        TABLES.replace("notes (\n", "notes(\n").replace("(text)", "(\n    text\n)"),
        TABLES.replace("NOT NULL\n", "NOT NULL  -- may be empty; see below\n"),
    ],
)
def test_digest_ignores_indentation_and_comments(same: str) -> None:
    assert same != TABLES
    assert replace(FIRST_FILE, migrations=(same,)).digest(1) == FIRST_FILE.digest(1)


@pytest.mark.parametrize(
    "other",
    [
        TABLES.replace("text TEXT", "words TEXT"),
        TABLES.replace(" NOT NULL", ""),
        f"{TABLES}CREATE TABLE tags (name TEXT);",
    ],
)
def test_digest_covers_the_declaration(other: str) -> None:
    assert other != TABLES
    assert replace(FIRST_FILE, migrations=(other,)).digest(1) != FIRST_FILE.digest(1)


def test_digest_covers_the_templates_of_its_version() -> None:
    table = "CREATE TABLE {name} (key bigint)"
    first = replace(FIRST_TABLES, templates=(table,))
    assert first.digest(1) != FIRST_TABLES.digest(1)
    second = replace(SECOND_TABLES, templates=(table, f"{table}; CREATE INDEX ON {{name}}"))
    assert second.digest(1) == first.digest(1) != second.digest(2)


async def opened(url: str, kind: PostgresKind) -> PostgresPool:
    return await PostgresPool.open(url, kind, size=1)


async def test_migrated_tables_have_their_rows_and_the_new_digest(database: str) -> None:
    pool = await opened(database, FIRST_TABLES)
    await pool.execute("INSERT INTO notes VALUES (1, 'bread')")
    with pytest.raises(StoreReadOnlyError):  # a replica cannot be migrated
        await opened(f"{database}&default_transaction_read_only=on", SECOND_TABLES)
    schemas = "SELECT version, digest FROM bottega_schemas"
    assert [*map(tuple, await pool.fetch(schemas))] == [(1, FIRST_TABLES.digest(1))]
    # Several processes at once: the migration would fail the second time.
    pools = await asyncio.gather(*(opened(database, SECOND_TABLES) for _ in range(4)))
    assert [*map(tuple, await pool.fetch(schemas))] == [(2, SECOND_TABLES.digest(2))]
    assert [*map(tuple, await pool.fetch("SELECT * FROM notes"))] == [(1, "bread", 1)]
    for one in (pool, *pools):
        await one.close()


async def test_kinds_of_one_database_have_their_own_versions(database: str) -> None:
    other = PostgresKind("list", ("CREATE TABLE entries (n integer)",))
    for kind in (SECOND_TABLES, other, SECOND_TABLES, other):
        await (await opened(database, kind)).close()
    with pytest.raises(StoreError, match="has format 2 of the notebook"):
        await opened(database, FIRST_TABLES)
