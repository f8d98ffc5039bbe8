"""Files and tables of other formats: one line names them, the versions and the way out, and nothing
is changed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from bottega._util.postgres import PostgresKind, display_url
from bottega._util.sqlite import FileKind
from bottega._util.store_kind import StoreKind
from bottega.errors import StoreError
from bottega.evaluation.report.runs import read_run
from bottega.evaluation.runs.run_store import FILE as RUN
from bottega.evaluation.runs.run_store import RUN_FILE, RunStore, open_run_traces
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import GATEWAY_DB, GATEWAY_TABLES
from bottega.gateway.apis.batches.batch_records import BATCHES_DB
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.postgres.schema import KNOWLEDGE_BASE as KNOWLEDGE_TABLES
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE
from bottega.recording import TraceStore
from bottega.recording.traces import TRACE_STORE, TRACE_TABLES
from tests.postgres import PostgresServer

Open = Callable[[Path], object]
FILES: dict[str, tuple[FileKind, Open]] = {
    "knowledge base": (KNOWLEDGE_BASE, lambda path: KnowledgeBase.open(path, None)),
    "accounts": (GATEWAY_DB, Accounts),
    "ledger": (GATEWAY_DB, Ledger),
    "run": (RUN_FILE, RunStore),
    "report of a run": (RUN_FILE, lambda path: read_run(path.parent)),
    "traces of a run": (RUN_FILE, open_run_traces),
    "batches": (BATCHES_DB, lambda path: BATCHES_DB.open(path, busy_seconds=1)),
    "traces": (TRACE_STORE, TraceStore.open),
}
TABLES: dict[str, tuple[PostgresKind, Callable[[str], object]]] = {
    "knowledge base": (KNOWLEDGE_TABLES, lambda url: KnowledgeBase.open(url, None)),
    "accounts": (GATEWAY_TABLES, Accounts),
    "ledger": (GATEWAY_TABLES, Ledger),
    "traces": (TRACE_TABLES, TraceStore.open),
}
# Part of the hint for each kind.
WAYS_OUT = {
    "knowledge base": "bottega export with the version that wrote it, then bottega import",
    "gateway database": "another --data folder or database, which begins without keys and ledger",
    "run": "another --out folder",
    "trace store": "set --traces or BOTTEGA_TRACES to another file or URL",
    "batch store": "another file or database",
}
OTHER = "0123456789abcdef"


def message(case: str, where: str, kind: StoreKind) -> tuple[str, str]:
    """Return the expected line and hint."""
    assert WAYS_OUT[kind.name] in kind.way_out
    way_out = f"{kind.way_out}; it was not changed"
    own = kind.version
    match case:
        case "development format":
            problem = f"has development format 8 of the {kind.name}"
            return f"{where} {problem}; this version of bottega reads release format {own}", way_out
        case "another schema":
            problem = f"has schema {OTHER} of {kind.name} format {own}"
            wanted = kind.digest(own)
            return f"{where} {problem}; this version of bottega reads schema {wanted}", way_out
        case "newer format":
            problem = f"has format {own + 1} of the {kind.name}"
            wanted = f"this version of bottega reads up to {own}"
            return f"{where} {problem}; {wanted}", "pip install --upgrade bottega-vlm"
    problem = f"is a SQLite file of another program, not a {kind.name}"
    return f"{where} {problem}", "check the path, or choose a new file name"


CHANGES = {
    "development format": "DROP TABLE bottega_schema; PRAGMA user_version = 8",
    "another schema": f"UPDATE bottega_schema SET digest = '{OTHER}'",
    "newer format": "PRAGMA user_version = {newer}",
    "another program": "PRAGMA application_id = 7",
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_file_of_another_format_is_refused_unchanged(tmp_path: Path, name: str, case: str) -> None:
    kind, open_file = FILES[name]
    path = tmp_path / RUN
    kind.open(path, busy_seconds=1).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(CHANGES[case].format(newer=kind.version + 1))
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        open_file(path)
    assert (str(caught.value), caught.value.hint) == message(case, str(path), kind)
    assert path.read_bytes() == before


DAMAGES = (
    "DELETE FROM bottega_schema",
    "INSERT INTO bottega_schema VALUES ('0123')",
    "UPDATE bottega_schema SET digest = 'a' || char(10) || 'b'",
    "PRAGMA user_version = 0",
    "PRAGMA user_version = -3",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_file_with_a_damaged_schema_is_refused_unchanged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gateway.db"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(damage)
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"has schema .* of gateway database format") as caught:
        Ledger(path)
    assert "\n" not in str(caught.value) and GATEWAY_DB.digest(1) in str(caught.value)
    assert path.read_bytes() == before


DEVELOPMENT = (
    "DROP TABLE bottega_schemas",
    "CREATE TABLE bottega_migrations (kind text PRIMARY KEY, version integer NOT NULL)",
    "INSERT INTO bottega_migrations VALUES ('{name}', 8)",
)
STATEMENTS = {
    "development format": DEVELOPMENT,
    "another schema": (f"UPDATE bottega_schemas SET digest = '{OTHER}'",),
    "newer format": ("UPDATE bottega_schemas SET version = version + 1",),
}


@pytest.mark.parametrize("case", STATEMENTS)
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_another_format_are_refused_unchanged(
    postgres: PostgresServer, database: str, name: str, case: str
) -> None:
    kind, open_tables = TABLES[name]
    open_tables(f"{database}&application_name=before").close()  # type: ignore[attr-defined]
    changes = [statement.format(name=kind.name) for statement in STATEMENTS[case]]
    postgres.execute(database, *changes)
    before = asyncio.run(contents(database))
    with pytest.raises(StoreError) as caught:
        open_tables(database)
    assert (str(caught.value), caught.value.hint) == message(case, display_url(database), kind)
    assert asyncio.run(contents(database)) == before


async def contents(url: str) -> list[object]:
    """Return the columns of all tables of the schema, and the rows of `bottega_...`."""
    connection = await asyncpg.connect(url)
    try:
        columns = await connection.fetch(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = current_schema() ORDER BY 1, ordinal_position"
        )
        own = dict.fromkeys(row[0] for row in columns if row[0].startswith("bottega_"))
        rows = [await connection.fetch(f"SELECT * FROM {table}") for table in own]
        return [*map(tuple, columns), *(tuple(row) for found in rows for row in found)]
    finally:
        await connection.close()
