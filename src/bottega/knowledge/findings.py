"""What a check of a file gives, and what checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bottega.knowledge.rows import SqliteRows

Repair = Callable[[], None]
# What is wrong, and how it is made again where it can be.
Finding = tuple[str, Repair | None]

PAGE = 256


def paged_keys(rows: SqliteRows, size: int = PAGE) -> Iterator[list[int]]:
    """Of all examples, in every namespace."""
    chosen = "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"
    key = 0
    while keys := [row[0] for row in rows.read(chosen, key, size)]:
        yield keys
        key = keys[-1]


def executed(rows: SqliteRows, statement: str) -> Repair:
    def mend() -> None:
        with rows.transaction() as connection:
            connection.execute(statement)

    return mend
