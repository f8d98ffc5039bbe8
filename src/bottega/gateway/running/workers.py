"""Several server processes on one port: a supervisor starts them and replaces those that die.

All workers accept connections from one listening socket, which the supervisor keeps open. A
connection that waits in its queue is therefore not lost when a worker dies, and an idle worker
accepts it before a busy one. With SO_REUSEPORT each worker has its own queue, which ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from bottega.errors import SettingError
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.process import CUT_SECONDS, EXIT_SECONDS, merged
from bottega.gateway.telemetry.logs import Style
from bottega.gateway.telemetry.worker_metrics import remove_gauges

log = logging.getLogger(__name__)

# The delay before a replacement doubles each time a worker dies within `STABLE_SECONDS`.
STABLE_SECONDS = 30.0
MAX_DELAY = 30.0
# A worker that still runs this long after drain_seconds is killed.
KILL_SECONDS = CUT_SECONDS + EXIT_SECONDS + 5
DRAIN, STOP = "drain", "stop"


@dataclass(frozen=True)
class WorkerTask:
    """Parameters of a worker process. The sockets are file descriptors."""

    config: Config
    style: Style
    listener: int
    metrics: int | None
    folder: Path
    name: str


@dataclass
class Worker:
    """Running worker process. Messages to it are `DRAIN`, `STOP` or a new configuration. It sends
    whether requests need a key, once it accepts connections."""

    name: str
    process: asyncio.subprocess.Process
    channel: Connection
    is_started: bool = False

    def send(self, message: object) -> None:
        with suppress(OSError):  # it has ended
            self.channel.send(message)

    async def started(self) -> bool | None:
        """Return whether requests need a key; None if the process ends before it listens."""
        try:
            protected = bool(await asyncio.to_thread(self.channel.recv))
        except (EOFError, OSError):
            return None
        self.is_started = True
        return protected


def check_workers(workers: int, config: Config) -> None:
    """Raise `SettingError` for several workers without shared state."""
    if workers > 1 and not config.state.is_shared:
        raise SettingError(
            f"several workers need a shared database, got {workers} workers without [state]",
            hint='set [state] database_env = "BOTTEGA_DATABASE" in the configuration and export a'
            " postgresql:// URL, or set --workers 1: without [state], each worker counts limits and"
            " budgets on its own",
        )


class Supervisor:
    """Supervisor of `number` workers. `announce` is called once with whether requests need a key.
    SIGTERM and SIGINT drain all workers, a second one stops them at once. SIGHUP sends the
    configuration that `read` returns."""

    def __init__(
        self,
        config: Config,
        number: int,
        sockets: Sequence[socket.socket],
        *,
        style: Style,
        announce: Callable[[bool], None],
        read: Callable[[], Config],
    ) -> None:
        self._config, self._number, self._style = config, number, style
        self._sockets, self._announce, self._read = sockets, announce, read
        self._workers: dict[int, Worker] = {}
        self._names = count(1)
        self._closing = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal. Return the exit status: that of the first worker if it does not
        start, 0 if all workers have drained, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        with tempfile.TemporaryDirectory(prefix="bottega-workers-") as folder:
            # The first worker migrates the database and reports errors of the configuration once.
            first = await self._start(0, Path(folder))
            protected = await first.started()
            if protected is None:
                status = await first.process.wait()
                return 0 if self._closing.is_set() else _exit_status(status)
            self._announce(protected)
            drained = await asyncio.gather(
                *(self._keep(number, Path(folder)) for number in range(self._number))
            )
        log.info("stopped")
        return 0 if all(drained) else 1

    async def _keep(self, number: int, folder: Path) -> bool:
        """Keep one worker running until the supervisor closes. Return whether it ended orderly."""
        loop, delay = asyncio.get_running_loop(), 0.0
        while not self._closing.is_set():
            begun = loop.time()
            worker = self._workers.get(number) or await self._start(number, folder)
            if not worker.is_started:
                await worker.started()
            status = await self._ended(worker)
            del self._workers[number]
            worker.channel.close()
            await asyncio.to_thread(remove_gauges, folder, worker.name)
            if self._closing.is_set():
                return status in (0, -signal.SIGTERM)  # terminated before it listened
            is_stable = loop.time() - begun > STABLE_SECONDS
            delay = 0.0 if is_stable else min(MAX_DELAY, 2 * delay or 0.5)
            log.error("worker %s ended with status %d and is replaced", worker.name, status)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
        return True

    async def _start(self, number: int, folder: Path) -> Worker:
        ours, theirs = Pipe()
        listener, *rest = (one.fileno() for one in self._sockets)  # a signal closes the first
        command = [sys.executable, "-P", "-m", "bottega", "serve-worker", str(theirs.fileno())]
        inherited = [theirs.fileno(), listener, *rest]
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=inherited, stdin=asyncio.subprocess.DEVNULL
        )
        theirs.close()
        worker = Worker(str(next(self._names)), process, ours)
        self._workers[number] = worker
        metrics = rest[0] if rest else None
        worker.send(WorkerTask(self._config, self._style, listener, metrics, folder, worker.name))
        if self._closing.is_set():  # the signal came while the process started
            self._drain(worker)
        return worker

    async def _ended(self, worker: Worker) -> int:
        """Wait for the end of a worker. Kill it if it does not end in time after the signal."""
        ended = asyncio.ensure_future(worker.process.wait())
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait((ended, closing), return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        try:
            limit = self._config.gateway.drain_seconds + KILL_SECONDS
            return await asyncio.wait_for(ended, limit if self._closing.is_set() else None)
        except TimeoutError:
            log.error("worker %s does not end and is killed", worker.name)
            worker.process.kill()
            return await worker.process.wait()

    def _on_stop(self) -> None:
        if self._closing.is_set():
            for worker in self._workers.values():
                worker.send(STOP)
            return
        self._closing.set()
        self._sockets[0].close()  # new connections are refused once all workers have closed theirs
        for worker in self._workers.values():
            self._drain(worker)

    def _drain(self, worker: Worker) -> None:
        if worker.is_started:
            worker.send(DRAIN)
        else:  # it reads no messages yet
            with suppress(ProcessLookupError):
                worker.process.terminate()

    def _on_reload(self) -> None:
        try:
            new = self._read()
        except SettingError as error:
            log.error("configuration not reloaded: %s (%s)", error, error.hint)
            return
        self._config = merged(self._config, new)  # for workers that start later
        for worker in self._workers.values():
            worker.send(new)


def _exit_status(status: int) -> int:
    return status if status > 0 else 128 - status


def receive_task(descriptor: int) -> tuple[WorkerTask, Connection]:
    """Return the task of this worker process and the channel to its supervisor."""
    channel = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    task = channel.recv()
    assert isinstance(task, WorkerTask)
    return task, channel
