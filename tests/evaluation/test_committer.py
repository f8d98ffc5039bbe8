from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bottega.evaluation.runs.run_store import Committer


def connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE IF NOT EXISTS stored (word TEXT)")
    return connection


def stored(path: Path) -> list[str]:
    with closing(connected(path)) as connection:
        return [word for (word,) in connection.execute("SELECT word FROM stored ORDER BY word")]


def test_queued_writes_are_committed_after_the_loop_closes(tmp_path: Path) -> None:
    path, started, slow = tmp_path / "stored.db", threading.Event(), threading.Event()
    committer = Committer(partial(connected, path))

    def write(word: str, connection: sqlite3.Connection) -> None:
        started.set()
        slow.wait(10)
        connection.execute("INSERT INTO stored VALUES (?)", (word,))

    async def interrupted() -> None:
        first = asyncio.create_task(committer.write(partial(write, "a")))
        # The first transaction has started, so later writes need another one.
        assert await asyncio.to_thread(started.wait, 10)
        rest = [asyncio.create_task(committer.write(partial(write, word))) for word in "bc"]
        await asyncio.sleep(0)
        for task in (first, *rest):
            task.cancel()

    asyncio.run(interrupted())
    slow.set()
    committer.close()
    assert stored(path) == ["a", "b", "c"]


async def test_closed_connection_raises_for_the_writer(tmp_path: Path) -> None:
    committer = Committer(partial(connected, tmp_path / "missing" / "stored.db"))
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            await asyncio.wait_for(committer.write(lambda connection: None), 5)
    committer.close()


async def test_failed_commit_raises_and_the_next_write_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "stored.db"

    def connect() -> sqlite3.Connection:
        connection = connected(path)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("CREATE TABLE questions (id INTEGER PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE replies (question INTEGER REFERENCES questions (id)"
            " DEFERRABLE INITIALLY DEFERRED)"
        )
        return connection

    committer = Committer(connect)
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):  # raised only by COMMIT
        await committer.write(partial(_insert, "INSERT INTO replies VALUES (99)"))
    await asyncio.wait_for(committer.write(partial(_insert, "INSERT INTO stored VALUES ('a')")), 5)
    committer.close()
    assert stored(path) == ["a"]


@pytest.mark.parametrize("conflict", ["INSERT", "INSERT OR ROLLBACK"])
async def test_failed_transaction_fails_all_writes_and_the_next_one_succeeds(
    tmp_path: Path, conflict: str
) -> None:
    path, started, release = tmp_path / "stored.db", threading.Event(), threading.Event()
    committer = Committer(partial(connected, path))

    def first(connection: sqlite3.Connection) -> None:
        started.set()
        release.wait(10)
        connection.execute("CREATE UNIQUE INDEX once ON stored (word)")

    done = asyncio.create_task(committer.write(first))
    # The first transaction has started: the next three writes share another one.
    assert await asyncio.to_thread(started.wait, 10)
    words = ("a", "b", "b")
    statements = [f"{conflict} INTO stored VALUES ('{word}')" for word in words]
    tasks = [asyncio.create_task(committer.write(partial(_insert, sql))) for sql in statements]
    await asyncio.sleep(0)
    release.set()
    await done
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [type(error) for error in errors] == [sqlite3.IntegrityError] * 3
    await asyncio.wait_for(committer.write(partial(_insert, "INSERT INTO stored VALUES ('c')")), 5)
    committer.close()
    assert stored(path) == ["c"]


def _insert(statement: str, connection: sqlite3.Connection) -> None:
    connection.execute(statement)
