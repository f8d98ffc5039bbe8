"""Worker process of `bottega serve --workers`: connections, messages and metrics."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Channel
from typing import Any

from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.process import DrainingServer, reload, run
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.running.workers import DRAIN, STOP, WorkerTask
from bottega.gateway.telemetry.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

# Pause after accepting a connection.
TURN_SECONDS = 0.001
# Pause after accepting has failed, for example for lack of file descriptors.
ERROR_SECONDS = 1.0


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
