"""Writes that come together are committed together, off the event loop."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress

Write = Callable[[sqlite3.Connection], None]
MOST_AT_ONCE = 256


class Committer:
    """Owns a connection in a thread of its own. Who awaits `write` knows it committed; what any
    write of a transaction raises, all of its writers raise."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._queue: queue.SimpleQueue[tuple[Write, asyncio.Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    async def write(self, write: Write) -> None:
        done = asyncio.get_running_loop().create_future()
        self._queue.put((write, done))
        await done

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            connection = self._connect()
        except Exception as refusal:  # it is raised where each writer waits
            self._refuse(refusal)
            return
        with closing(connection):
            while (batch := self._batch()) is not None:
                error = _committed(connection, [write for write, _ in batch])
                for _, done in batch:
                    _tell(done, error)

    def _refuse(self, error: Exception) -> None:
        while (batch := self._batch()) is not None:
            for _, done in batch:
                _tell(done, error)

    def _batch(self) -> list[tuple[Write, asyncio.Future[None]]] | None:
        """What waits by now, at least one write; None when closed."""
        first = self._queue.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < MOST_AT_ONCE and not self._queue.empty():
            following = self._queue.get()
            if following is None:
                self._queue.put(None)  # closing waits for what came before
                break
            batch.append(following)
        return batch


def _committed(connection: sqlite3.Connection, writes: list[Write]) -> Exception | None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        for write in writes:
            write(connection)
        connection.execute("COMMIT")
    except Exception as error:  # it is raised where each writer waits
        with suppress(sqlite3.Error):  # SQLite has rolled back by itself
            connection.execute("ROLLBACK")
        return error
    return None


def _tell(done: asyncio.Future[None], error: Exception | None) -> None:
    def tell() -> None:
        if done.done():  # its writer was cancelled
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with suppress(RuntimeError):  # closed loop: no caller waits, the write is kept
        done.get_loop().call_soon_threadsafe(tell)
