"""Servers of PostgreSQL that refuse, fail or end connections: clear errors, and nothing lost."""

from __future__ import annotations

import os
import pwd
import random
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega.errors import (
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from bottega.image import Image
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.knowledge.postgres import rows as rows_module
from bottega.knowledge.postgres.schema import KNOWLEDGE_BASE
from bottega.types import Example, Query
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example
from tests.postgres import PostgresServer, copied_binaries, running_postgres

asyncpg = pytest.importorskip("asyncpg")

LIMITED = "limited"


@pytest.fixture
def database(whole_database: str) -> str:
    """Return the URL of an empty database, whose settings a test may change."""
    return whole_database


def opened(url: str) -> KnowledgeBase:
    return KnowledgeBase.open(url, SeededEmbedder())


def failure(url: str, work: Callable[[KnowledgeBase], object] = len) -> StoreError:
    with pytest.raises(StoreError) as caught, opened(url) as kb:
        work(kb)
    assert caught.value.hint
    for secret in ("secret", "wrong"):
        assert secret not in f"{caught.value}{caught.value.hint}"
    return caught.value


@pytest.fixture
def limited(postgres: PostgresServer, database: str) -> Iterator[str]:
    """Return the URL of the database for a user without rights."""
    postgres.execute(database, f"CREATE ROLE {LIMITED} LOGIN PASSWORD 'secret'")
    yield database.replace("postgres:secret", f"{LIMITED}:secret")
    postgres.execute(database, f"DROP OWNED BY {LIMITED}", f"DROP ROLE {LIMITED}")


def test_wrong_password_names_where_it_is_set(database: str) -> None:
    error = failure(database.replace("secret", "wrong"))
    assert "rejects the user or the password" in str(error)
    assert "its URL, PGPASSWORD or ~/.pgpass" in error.hint


def test_missing_right_to_create_the_extension(
    postgres: PostgresServer, database: str, limited: str
) -> None:
    postgres.execute(database, f"GRANT CREATE ON SCHEMA public TO {LIMITED}")
    error = failure(limited)
    assert "lacks the extension vector, and this user may not create it" in str(error)
    assert "run CREATE EXTENSION vector" in error.hint
    postgres.execute(database, "CREATE EXTENSION vector")
    with opened(limited) as kb:
        assert kb.add([text_example("a")]).new == 1


def test_missing_rights_on_tables(postgres: PostgresServer, database: str, limited: str) -> None:
    assert "CREATE on the schema" in failure(limited).hint
    with opened(database) as kb:
        kb.add([text_example("a")])
    error = failure(limited)
    assert "permission denied for table bottega_schemas" in str(error)
    assert "ALL on existing tables" in error.hint
    postgres.execute(database, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {LIMITED}")
    with opened(limited) as kb:
        assert len(kb.search(Query("a"), 1, include_self=True)) == 1
        with pytest.raises(StoreError, match="permission denied"):
            kb.add([text_example("b")])


def test_outdated_extension(postgres: PostgresServer, database: str) -> None:
    postgres.execute(
        database,
        "CREATE EXTENSION vector",
        "UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'",
    )
    error = failure(database)
    assert "must have version 0.8 or newer, got 0.7.4" in str(error)
    assert "ALTER EXTENSION vector UPDATE" in error.hint


@pytest.mark.slow
def test_server_without_the_extension() -> None:
    with running_postgres() as server:
        if not server.binaries.is_relative_to(server.folder):
            server.stop()
            server.binaries = copied_binaries(server.binaries, server.folder)
            server.start()
        next(server.binaries.rglob("extension/vector.control")).unlink()
        error = failure(server.url())
        assert "lacks the extension vector" in str(error)
        assert "install pgvector 0.8 or newer on the server" in error.hint


def test_read_only_database_can_be_searched(database: str) -> None:
    read_only = f"{database}?default_transaction_read_only=on"
    assert isinstance(failure(read_only), StoreReadOnlyError)  # it has no tables yet
    with opened(database) as kb:
        kb.add([text_example("a")])
    with opened(read_only) as kb:
        assert kb.search(Query("a"), 1, include_self=True)[0].score == pytest.approx(1)
        kb.used(kb.ids())  # not written on close
        with pytest.raises(StoreReadOnlyError, match="is read-only, for example") as caught:
            kb.add([text_example("b")])
        assert "URL of the primary" in caught.value.hint


@pytest.mark.slow
def test_replica_can_be_searched() -> None:
    with running_postgres() as server, opened(server.url()) as primary:
        primary.add([text_example("a")])
        with server.replica() as replica, opened(replica.url()) as kb:
            primary.add([text_example("b")])
            end = time.monotonic() + 20
            while len(kb) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            assert kb.search(Query("b"), 1, include_self=True)[0].score == pytest.approx(1)
            for change in (
                lambda: kb.add([text_example("c")]),
                lambda: kb.delete(kb.ids()),
                lambda: kb.pin(kb.ids()),
                lambda: kb.reindex("default", SeededEmbedder("other")),
            ):
                with pytest.raises(StoreReadOnlyError):
                    change()
            assert kb.verify().sound


NEWER = "ALTER TABLE kb_notes ADD COLUMN written double precision"


def test_two_versions_on_one_database(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open handle of an older version continues; a new one is refused."""
    with opened(database) as older:
        older.add([text_example("a")])
        with monkeypatch.context() as patch:
            newer = replace(KNOWLEDGE_BASE, migrations=(*KNOWLEDGE_BASE.migrations, NEWER))
            patch.setattr(rows_module, "KNOWLEDGE_BASE", newer)
            replica = f"{database}?default_transaction_read_only=on"
            assert isinstance(failure(replica), StoreReadOnlyError)  # it cannot be migrated
            with opened(f"{database}?application_name=newer") as kb:  # another pool
                assert kb.add([text_example("b")]).new == 1
                assert kb.search(Query("a"), 1, include_self=True)[0].score == pytest.approx(1)
        with older._rows.lock(9):  # type: ignore[attr-defined]  # needs a second connection
            assert older.add([text_example("c")]).new == 1 and len(older) == 3
        older.set_note("a", "b")
        error = failure(f"{database}?application_name=older")
        assert f"has format {KNOWLEDGE_BASE.version + 1} of the knowledge base" in str(error)
        assert "pip install --upgrade" in error.hint


def test_newer_format_on_a_replica_is_named(postgres: PostgresServer, database: str) -> None:
    with opened(database):
        pass
    postgres.execute(database, "UPDATE bottega_schemas SET version = 9")
    assert "has format 9" in str(failure(f"{database}?default_transaction_read_only=on"))


@contextmanager
def locked(url: str, table: str) -> Iterator[Callable[..., Any]]:
    """Lock a table against writers, and yield a function that runs a query."""

    async def lock() -> tuple[Any, Any]:
        connection = await asyncpg.connect(url)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
        return connection, await asyncpg.connect(url)

    holder, other = BACKGROUND_LOOP.run(lock())
    try:
        yield lambda query: BACKGROUND_LOOP.run(other.fetchval(query))
    finally:
        for connection in (holder, other):
            BACKGROUND_LOOP.run(connection.close())


WAITING = " FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'relation'"


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("table", "work", "count"),
    [
        ("kb_vectors_1", lambda kb: kb.add([image_example(2), image_example(3)]).new, 3),
        ("kb_images", lambda kb: kb.delete(kb.ids()), 0),  # after deleting rows and logging it
    ],
)
def test_cut_connection_leaves_nothing_half_written(
    database: str, table: str, work: Callable[[KnowledgeBase], object], count: int
) -> None:
    with opened(database) as kb:
        kb.add([image_example(1)])
        caught: list[Exception] = []

        def write() -> None:
            try:
                work(kb)
            except StoreError as error:
                caught.append(error)

        with locked(database, table) as query:
            writer = threading.Thread(target=write)
            writer.start()
            wait_until(lambda: query(f"SELECT count(*) {WAITING}"))
            query(f"SELECT pg_terminate_backend(pid) {WAITING}")
            writer.join()
        [error] = caught
        assert isinstance(error, StoreUnavailableError) and error.retryable
        assert "terminating connection due to administrator command" in str(error)
        assert "try again" in error.hint
        assert len(kb) == 1 and len(list(kb.changes())) == 1 and kb.verify().sound
        work(kb)
        assert len(kb) == count and kb.verify().sound


def test_exhausted_pool(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega._util.postgres.POOL_SIZE", 1)
    with opened(database) as kb:
        kb.add([text_example("a")])
        with locked(database, "kb_vectors_1") as query:
            writer = threading.Thread(target=kb.add, args=([text_example("b")],))
            writer.start()
            wait_until(lambda: query(f"SELECT count(*) {WAITING}"))
            with monkeypatch.context() as patch:
                patch.setattr("bottega._util.postgres.WAIT_SECONDS", 0.05)
                with pytest.raises(StoreBusyError, match="no free connection") as caught:
                    kb.ids()
            assert caught.value.retryable and "fewer threads" in caught.value.hint
        writer.join()
        assert len(kb) == 2


@pytest.mark.slow
def test_server_without_free_connections() -> None:
    with running_postgres(max_connections="8") as server:

        async def fill() -> list[Any]:
            return [await asyncpg.connect(server.url()) for _ in range(8)]

        used = BACKGROUND_LOOP.run(fill())
        error = failure(server.url())
        assert isinstance(error, StoreBusyError) and "max_connections" in error.hint
        for connection in used:
            BACKGROUND_LOOP.run(connection.close())
        with opened(server.url()) as kb:
            assert kb.add([text_example("a")]).new == 1


def test_silent_server_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega._util.postgres.CONNECT_SECONDS", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = failure(f"postgresql://u:secret@127.0.0.1:{silent.getsockname()[1]}/d")
    assert isinstance(error, StoreUnavailableError) and "no answer in 0.05 s" in str(error)


def test_invalid_options_of_a_url(database: str) -> None:
    error = failure(f"{database}?sslmode=wrongly")
    assert "the URL of" in str(error) and "after the ?" in error.hint


# A trigger raises the error of a full disk while a row is logged.
FULL = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON kb_changes EXECUTE FUNCTION fail();
"""


def test_full_disk_stores_all_or_nothing(postgres: PostgresServer, database: str) -> None:
    with opened(database) as kb:
        kb.add([text_example("a")])
        postgres.execute(database, FULL)
        error = failure(database, lambda kb: kb.add([text_example("b")]))
        assert isinstance(error, StoreFullError) and "free disk space on the server" in error.hint
        assert len(kb) == 1 and kb.verify().sound
        postgres.execute(database, "DROP TRIGGER full_disk ON kb_changes")
        assert kb.add([text_example("b")]).new == 1


@contextmanager
def small_disk(user: str | None) -> Iterator[Path]:
    """Mount a file system of 24 MB; skip the test without the right to do that."""
    with tempfile.TemporaryDirectory(prefix="bottega-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        try:
            Path(folder).chmod(0o755)
            space = Path(folder) / "space"
            space.mkdir()
            if user is not None:
                os.chown(space, pwd.getpwnam(user).pw_uid, -1)
            yield space
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def photograph(rng: random.Random) -> Image:
    """Return an image of 400 kB that does not compress."""
    return Image.from_pillow(Pillow.frombytes("RGB", (370, 370), rng.randbytes(370 * 370 * 3)))


@pytest.mark.slow
def test_full_tablespace_keeps_what_was_acknowledged() -> None:
    rng, stored = random.Random(0), 0
    with running_postgres() as server, small_disk(server.user) as disk:
        server.execute(
            server.url(),
            f"CREATE TABLESPACE small LOCATION '{disk}'",
            "CREATE DATABASE small TABLESPACE small",
        )
        with KnowledgeBase.open(server.url("small"), PixelEmbedder()) as kb:
            with pytest.raises(StoreFullError, match="no space left on its disk"):
                while stored < 100:
                    kb.add([Example(Query("What?", (photograph(rng),)), "noise")])
                    stored += 1
            assert 5 < stored < 100
            assert len(kb) == stored == len(list(kb.changes())) and kb.verify().sound
            remount = ["mount", "-o", "remount,size=64m", str(disk.parent)]
            subprocess.run(remount, check=True)
            assert kb.add([Example(Query("What?", (photograph(rng),)), "noise")]).new == 1
            assert len(kb.search(Query("What?", (photograph(rng),)), stored)) == stored
