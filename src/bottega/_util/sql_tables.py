"""Tables in SQLite or PostgreSQL, with one declaration and one form of statements.

A statement is valid in both, with parameters such as ?1; `SqlDialect` has what differs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from bottega._util.postgres import PostgresKind, PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from bottega._util.sqlite import FileKind, transaction
from bottega.image import path_text

REPORT_SECONDS = 600.0
MAX_USD = 1e12
MAX_COUNT = 2**40  # so daily sums stay below 2**63
MAX_SHORT = 300  # characters
SqlRow = tuple[Any, ...]
Statement = tuple[str, Sequence[object]]


@dataclass(frozen=True)
class SqlDialect:
    """Differences between SQLite and PostgreSQL. The last three are formats for an expression."""

    types: dict[type, str]
    collation: str  # of texts
    without_rowid: str  # end of a table that is stored by its primary key
    row_id: str
    for_update: str  # end of a SELECT that locks its rows
    skip_locked: str  # end of one that locks its rows, without those that others have locked
    floor: str  # integer part of a positive number
    leading_number: str  # number at the beginning of a text
    json_texts: str  # texts of a JSON array, as a subquery


SQLITE = SqlDialect(
    {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER", bytes: "BLOB"},
    collation="",
    without_rowid=" WITHOUT ROWID",
    row_id="rowid",
    for_update="",
    skip_locked="",
    floor="CAST({} AS INTEGER)",  # of a positive number
    leading_number="CAST({} AS REAL)",
    json_texts="SELECT value FROM json_each({})",
)
POSTGRES = SqlDialect(
    {str: "text", int: "bigint", float: "double precision", bool: "boolean", bytes: "bytea"},
    collation=' COLLATE "C"',  # sorted as in SQLite, so reports of both have the same figures
    without_rowid="",
    row_id="ctid",
    for_update=" FOR UPDATE",
    skip_locked=" FOR UPDATE SKIP LOCKED",
    floor="CAST(floor({}) AS bigint)",
    leading_number="CAST(split_part({}, ' ', 1) AS double precision)",
    json_texts="SELECT jsonb_array_elements_text(CAST({} AS jsonb))",
)


def storable_text(text: str) -> str:
    """Return the text with NUL and lone surrogates replaced, which the databases reject."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def dollars(cost: float | None) -> float | None:
    """Return the cost, None if it is negative, NaN or too large: one infinite cost would use up
    every budget."""
    return cost if cost is not None and 0 <= cost < MAX_USD else None


def _short(text: str) -> str:
    return storable_text(text[:MAX_SHORT])


def _dollars_or_zero(cost: float) -> float:
    return dollars(cost) or 0.0


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None


def _finite_or_zero(number: float) -> float:
    return _finite(number) or 0.0


def _seconds(number: float) -> float:
    return min(max(0.0, _finite_or_zero(number)), 1e9)  # sums must stay finite


# Types of columns. Values from upstreams are changed to acceptable ones, since one value that a
# database rejects would fail the whole batch.
Text = Annotated[str, storable_text]
OptionalText = Annotated[str | None, storable_text]
Count = Annotated[int, _count]
Number = Annotated[float, _finite_or_zero]
OptionalNumber = Annotated[float | None, _finite]
ShortText = Annotated[str, _short]
Dollars = Annotated[float, _dollars_or_zero]
OptionalDollars = Annotated[float | None, dollars]
Seconds = Annotated[float, _seconds]


@dataclass(frozen=True)
class Column:
    """Column of a table. `clean` makes a value acceptable for both databases."""

    name: str
    type: type
    is_nullable: bool
    clean: Callable[[Any], Any] | None


class TableSchema:
    """Table whose columns are the fields of a dataclass, with the same names and order. A field
    `Annotated[T, clean]` is stored as `clean(value)`, None as NULL. The column of any type but
    those of `SqlDialect` is text, to which `clean` or the caller converts the value."""

    def __init__(self, name: str, row_type: type) -> None:
        hints = get_type_hints(row_type, include_extras=True)
        self.name = name
        self.columns = [_column(name, hint) for name, hint in hints.items()]
        self.names = [column.name for column in self.columns]
        self.column_list = ", ".join(self.names)
        self.placeholders = placeholders(len(self.names))
        self._values = attrgetter(*self.names)
        self._cleaners = [column.clean for column in self.columns]

    def row(self, one: object) -> SqlRow:
        """Return the columns of an instance."""
        pairs = zip(self._cleaners, self._values(one), strict=True)
        return tuple([v if c is None or v is None else c(v) for c, v in pairs])

    def create(self, dialect: SqlDialect, *, key: str = "", more: str = "") -> str:
        """Return the statement that creates the table. `key` are the columns of a primary key by
        which SQLite stores the rows; `more` are further columns and constraints."""
        parts = [self._definition(column, dialect) for column in self.columns]
        parts += [more] if more else []
        parts += [f"PRIMARY KEY ({key})"] if key else []
        end = dialect.without_rowid if key else ""
        return f"CREATE TABLE {self.name} ({', '.join(parts)}){end};"

    @staticmethod
    def _definition(column: Column, dialect: SqlDialect) -> str:
        collation = dialect.collation if column.type is str else ""
        end = "" if column.is_nullable else " NOT NULL"
        return f"{column.name} {dialect.types[column.type]}{collation}{end}"


def _column(name: str, hint: Any) -> Column:
    clean = None
    if get_origin(hint) is Annotated:
        hint, clean = get_args(hint)
    alternatives = [one for one in get_args(hint) if one is not type(None)]
    is_nullable = type(None) in get_args(hint)
    kind = alternatives[0] if is_nullable else hint
    if kind not in SQLITE.types:
        kind = str
    return Column(name, kind, is_nullable, clean)


class FileTables:
    """Tables of one kind in an SQLite file. Methods block and raise `StoreError`."""

    dialect = SQLITE

    def __init__(
        self, path: Path, kind: FileKind, *, create: bool = True, busy_seconds: float = 10.0
    ) -> None:
        self.name = path_text(path)
        self._path, self._kind, self._busy_seconds = path, kind, busy_seconds
        self._lock = threading.Lock()
        with kind.translated(self.name):
            self._connection = kind.open(path, create=create, busy_seconds=busy_seconds)

    def execute(self, statement: str, *values: object) -> list[SqlRow]:
        """Run one statement and return its rows. In PostgreSQL it runs again after a lost
        connection, so a second run must change nothing."""
        with self._lock, self._kind.translated(self.name):
            return self._connection.execute(statement, values).fetchall()

    def report(self, statement: str, *values: object) -> list[SqlRow]:
        """Return the rows of a long query, without delaying other callers."""
        reader = FileTables(self._path, self._kind, create=False, busy_seconds=self._busy_seconds)
        try:
            return reader.execute(statement, *values)
        finally:
            reader.close()

    def write(self, statements: Sequence[Statement]) -> list[SqlRow]:
        """Run statements in one transaction, once. Return the rows of the last one."""
        rows: list[SqlRow] = []
        with self._lock, self._kind.translated(self.name), transaction(self._connection):
            for statement, values in statements:
                rows = self._connection.execute(statement, values).fetchall()
        return rows

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class DatabaseTables:
    """Tables in PostgreSQL, with the methods of `FileTables`. A call without an answer fails after
    `answer_seconds`, a report after `REPORT_SECONDS`, or after `answer_seconds` if the server does
    not answer at all. Reports have connections of their own, since many may run for long."""

    dialect = POSTGRES

    def __init__(self, url: str, kind: PostgresKind, *, answer_seconds: float) -> None:
        self.database = PostgresDatabase(url, kind, answer_seconds=answer_seconds)
        # A newer version may migrate the tables before the first report.
        self._reports = PostgresDatabase(
            url, kind, answer_seconds=REPORT_SECONDS, migrates=False, size=3
        )
        self.name = self.database.name

    def execute(self, statement: str, *values: object) -> list[SqlRow]:
        return [tuple(row) for row in self.database.read(postgres_statement(statement), *values)]

    def report(self, statement: str, *values: object) -> list[SqlRow]:
        self.database.read("SELECT 1")  # a server that hangs must not hold the caller for long
        return [tuple(row) for row in self._reports.read(postgres_statement(statement), *values)]

    def write(self, statements: Sequence[Statement]) -> list[SqlRow]:
        async def work(pool: PostgresPool) -> list[SqlRow]:
            rows: list[Any] = []
            # A single statement is its own transaction and needs no further round trips.
            opened = pool.connection if len(statements) == 1 else pool.transaction
            async with opened() as connection:
                for statement, values in statements:
                    rows = await connection.fetch(postgres_statement(statement), *values)
            return [tuple(row) for row in rows]

        return self.database.run(work)

    def close(self) -> None:
        self.database.close()
        self._reports.close()


SqlTables = FileTables | DatabaseTables


def placeholders(count: int) -> str:
    """Return a list of parameters, from ?1 on."""
    return ", ".join(f"?{number}" for number in range(1, count + 1))


def optional(column: str, number: int) -> str:
    """Return the condition that a text column has the value of a parameter, unless that is null."""
    return f"(CAST(?{number} AS TEXT) IS NULL OR {column} = ?{number})"


def postgres_statement(statement: str) -> str:
    """Return a statement with PostgreSQL's form of parameters."""
    return statement.replace("?", "$")
