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
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import Connection as Channel
from pathlib import Path
from typing import Any

from bottega.errors import SettingError
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.process import (
    CUT_SECONDS,
    EXIT_SECONDS,
    DrainingServer,
    merged,
    reload,
    run,
)
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.telemetry.logs import Style
from bottega.gateway.telemetry.metrics import WorkerMetrics, remove_gauges

# Pause after accepting a connection.
TURN_SECONDS = 0.001
# Pause after accepting has failed, for example for lack of file descriptors.
ERROR_SECONDS = 1.0

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


class SharedListener:
    """Listening socket that several processes share.

    It accepts one connection and then pauses for a millisecond, in which other workers accept. The
    servers of asyncio and uvloop accept all waiting connections at once: one worker would get a
    whole burst, and keep it as long as its clients reuse their connections.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._protocol = listener, protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_open = True
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn itself waits for connections to end."""

    def _listen(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or the client left
        except OSError as error:
            log.error("connections cannot be accepted: %s", error.strerror)
            self._pause(ERROR_SECONDS)
            return
        self._pause(TURN_SECONDS)
        accepted.setblocking(False)
        task = self._loop.create_task(self._connect(accepted))
        self._tasks.add(task)  # the loop holds tasks by weak references only
        task.add_done_callback(self._tasks.discard)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._listen)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError:  # the client left
            accepted.close()


class WorkerServer(DrainingServer):
    """Server that shares its sockets with other workers and is controlled by a supervisor."""

    def __init__(self, *settings: Any, channel: Channel, apply: Callable[[Config], None]) -> None:
        super().__init__(*settings)
        self._channel, self._apply = channel, apply

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._listeners = list(sockets or [])
        loop = asyncio.get_running_loop()
        self.servers = [SharedListener(one, self._protocol) for one in sockets or []]  # type: ignore[misc]
        loop.add_reader(self._channel.fileno(), self._on_message)

    def _on_message(self) -> None:
        try:
            message = self._channel.recv()
        except (EOFError, OSError):  # the supervisor was killed
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            message = DRAIN
        if isinstance(message, Config):
            self._apply(message)
        elif message == STOP:
            self.stop_at_once()
        else:
            self.drain()

    def _on_sighup(self) -> None:
        """Ignore it: the supervisor gets the same signal and sends the configuration."""


def run_worker(gateway_server: GatewayServer, task: WorkerTask, channel: Channel) -> None:
    """Serve until the supervisor sends `DRAIN` or `STOP`, or ends."""
    metrics = WorkerMetrics(task.folder, task.name, gateway_server.metrics.collect)
    gateway_server.worker_metrics = metrics

    def started() -> None:
        with suppress(OSError):
            channel.send(gateway_server.gateway.authenticate is not None)

    def apply(config: Config) -> None:
        reload(gateway_server, lambda: config)

    build = partial(WorkerServer, channel=channel, apply=apply)
    sockets = [task.listener, *([] if task.metrics is None else [task.metrics])]
    listener, *rest = (socket.socket(fileno=one) for one in sockets)
    run(gateway_server, listener, started, metrics=rest[0] if rest else None, build=build)
