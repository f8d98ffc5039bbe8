from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bottega.evaluation.committing import Committer


def connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE IF NOT EXISTS said (word TEXT)")
    return connection


def said(path: Path) -> list[str]:
    with closing(connected(path)) as connection:
        return [word for (word,) in connection.execute("SELECT word FROM said ORDER BY word")]


def test_what_waits_is_written_when_its_loop_is_gone(tmp_path: Path) -> None:
    path, slow = tmp_path / "said.db", threading.Event()
    committer = Committer(partial(connected, path))

    def write(word: str, connection: sqlite3.Connection) -> None:
        slow.wait(10)
        connection.execute("INSERT INTO said VALUES (?)", (word,))

    async def interrupted() -> None:
        first = asyncio.create_task(committer.write(partial(write, "a")))
        await asyncio.sleep(0.05)  # its transaction has begun, so what follows needs another one
        rest = [asyncio.create_task(committer.write(partial(write, word))) for word in "bc"]
        await asyncio.sleep(0)
        for task in (first, *rest):
            task.cancel()

    asyncio.run(interrupted())
    slow.set()
    committer.close()
    assert said(path) == ["a", "b", "c"]


async def test_a_writer_without_a_connection_is_told(tmp_path: Path) -> None:
    committer = Committer(partial(connected, tmp_path / "missing" / "said.db"))
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            await asyncio.wait_for(committer.write(lambda connection: None), 5)
    committer.close()
