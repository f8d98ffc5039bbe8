"""The server process: sockets, uvicorn, reload on SIGHUP, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from bottega._util.progress import plural
from bottega.errors import SettingError
from bottega.gateway.asgi import Admission
from bottega.gateway.config.config_file import SECTIONS
from bottega.gateway.config.gateway_settings import Config, ServerSettings
from bottega.gateway.running.build import (
    build_experiment,
    build_fetch,
    key_defaults,
    request_limits,
)
from bottega.gateway.running.connection import ClientConnection
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.running.tiers import price_overrides
from bottega.recording import PriceTable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
LARGE_BLOCK, KEPT_AT_HEAP_END, ARENAS = 12 << 20, 32 << 20, 2

log = logging.getLogger(__name__)

# Maximum time that the event loop waits for the threads that write the ledger and the log.
SWITCH_SECONDS = 0.0005
# Time in which clients may use their idle connections once more after SIGTERM.
IDLE_SECONDS = 1.0
# After draining, requests that still run are cancelled.
CUT_SECONDS = 1
# After that the process exits: a thread that loads a model cannot be stopped.
EXIT_SECONDS = 5.0
PORT_STEP = 20  # from a port in use to the suggested one
# Settings that need no restart, by section.
RELOADED = {
    "gateway": ("max_concurrent", "allowed_hosts", "allowed_origins", "finish_seconds"),
    "experiment": ("share",),
    "keys": ("max_concurrent", "tiers", "max_namespaces"),
    "limits": (
        *("messages", "text_characters", "images", "image_mb", "image_pixels", "request_pixels"),
        *("fields", "fetch_images", "fetch_hosts", "fetch_mb", "fetch_seconds"),
    ),
}


def bind_socket(listening: ServerSettings) -> socket.socket:
    """Bind the port, before any model is loaded. Raises `SettingError`."""
    host, port = listening.host, listening.port
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        # The next ones may be taken, too: 8000 is the gateway's and 8001 that of `bottega ui`.
        other = port + PORT_STEP if 1023 < port <= 65535 - PORT_STEP else 8000
        hint = f"use --port {other}, or --port 0 for a free one"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "use --host 127.0.0.1 for this machine only, or --host :: for all its addresses"
        raise SettingError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint=hint
        ) from error
    return found


def bind_metrics_socket(listening: ServerSettings) -> socket.socket | None:
    """Return the bound socket of the metrics port, None if it is not set. Raises `SettingError`."""
    if listening.metrics_port is None:
        return None
    try:
        return bind_socket(
            replace(listening, host=listening.metrics_host, port=listening.metrics_port)
        )
    except SettingError as error:
        raise SettingError(
            str(error), hint="change gateway.metrics_port and gateway.metrics_host"
        ) from error


def base_url(listening: ServerSettings, port: int) -> str:
    """Return the base URL for clients on this machine."""
    host = listening.host
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown and '[' not in shown else shown}:{port}/v1"


def run(
    gateway_server: GatewayServer,
    listener: socket.socket,
    started: Callable[[], None],
    *,
    metrics: socket.socket | None = None,
    read: Callable[[], Config] | None = None,
    build: Callable[..., DrainingServer] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, and then until the requests in progress have ended, at most
    `drain_seconds`. A second signal ends it at once. SIGHUP applies the settings that `read`
    returns; without `read` it acts like SIGTERM. `build` creates the server."""
    sys.setswitchinterval(SWITCH_SECONDS)
    unmap_large_blocks()
    gateway_server.when_ready = _freeze_garbage_collector
    config = uvicorn_config(gateway_server.app)
    seconds = gateway_server.config.gateway.drain_seconds
    sockets = [listener]
    if metrics is not None:
        gateway_server.inner.metrics_port = metrics.getsockname()[1]
        sockets.append(metrics)
    server = (build or DrainingServer)(config, gateway_server.app, seconds, started, _schedule_exit)
    if read is not None:
        server.reload = partial(reload, gateway_server, read)
    server.run(sockets)
    log.info("stopped")


def _freeze_garbage_collector() -> None:
    """Exclude the loaded models from garbage collection, which would traverse them repeatedly."""
    gc.collect()
    gc.freeze()


def _schedule_exit() -> None:
    def exit_at_once() -> None:  # stored data are durable; only the loading of a model is lost
        log.warning("stopped while a model or cache was still loading or closing")
        logging.getLogger().handlers[0].close()
        os._exit(0)

    leaving = threading.Timer(EXIT_SECONDS, exit_at_once)
    leaving.daemon = True
    leaving.start()


def uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ClientConnection,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=CUT_SECONDS,
        server_header=False,
        proxy_headers=False,  # a client could forge its address
        ws="none",
    )


class DrainingServer(uvicorn.Server):
    """Server that finishes the requests in progress before it exits."""

    def __init__(
        self,
        config: uvicorn.Config,
        admission: Admission,
        seconds: float,
        started: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_end = on_end
        self._admission, self._seconds, self._on_started = admission, seconds, started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[object]] = []  # the loop holds tasks by weak references
        self.reload: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = list(sockets or [])
        if hasattr(signal, "SIGHUP"):  # its default ends the process without draining
            self._loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._admission.closing or self._loop is None:
            self.stop_at_once()
        else:
            self.drain()

    def stop_at_once(self) -> None:
        """Stop without waiting for the requests in progress."""
        self._on_end()
        self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Refuse new connections, and stop once the requests on open ones have ended."""
        if self._admission.closing:
            return
        assert self._loop is not None
        self._admission.closing = True
        # A signal handler may run while the loop sleeps; this call also wakes the loop.
        self._loop.call_soon_threadsafe(self._drain)

    def _on_sighup(self) -> None:
        if self.reload is not None:
            self.reload()
        else:
            self.handle_exit(signal.SIGHUP, None)

    def _drain(self) -> None:
        log.info("draining: %s in flight", plural(self._admission.in_flight, "request"))
        self._stop_listening()
        for connection in self.server_state.connections:
            if isinstance(connection, ClientConnection) and connection.cycle is not None:
                # The client's next request goes to another gateway.
                connection.cycle.keep_alive = False
        # The attribute keeps the task alive: the loop holds tasks by weak references only.
        self._draining = asyncio.ensure_future(self._drained())

    def _stop_listening(self) -> None:
        """Accept the connections that wait, because closing the socket resets them, and refuse
        further ones. The metrics port stays open."""
        if not (self._listeners and getattr(self, "servers", None)):  # not started yet
            return
        assert self._loop is not None
        listener = self._listeners[0]
        with suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                self._accepting.append(
                    self._loop.create_task(
                        self._loop.connect_accepted_socket(self._protocol, accepted)
                    )
                )
        self.servers[0].close()

    def _protocol(self) -> asyncio.Protocol:
        return ClientConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _drained(self) -> None:
        """Wait for the requests in progress, and for further ones on open connections, which end
        with their replies. A load balancer may just be sending on an idle connection: closing it
        too early would lose that request."""
        loop = asyncio.get_running_loop()
        begun, seconds = loop.time(), self._seconds
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await self._admission.finish(seconds)
        while self.server_state.connections and loop.time() - begun < min(IDLE_SECONDS, seconds):
            await asyncio.sleep(0.02)
            await self._admission.finish(seconds - (loop.time() - begun))
        self._on_end()
        self.should_exit = True


def reload(gateway_server: GatewayServer, read: Callable[[], Config]) -> None:
    """Apply the settings that `read` returns and that need no restart, and log the others. An
    invalid configuration changes nothing."""
    try:
        new = read()
        applied = merged(gateway_server.config, new)
        prices = price_overrides(applied, gateway_server.tier_set.served)
    except SettingError as error:
        log.error("configuration not reloaded: %s (%s)", error, error.hint)
        return
    changed = list(_changed(gateway_server.config, applied))
    gateway_server.config = applied
    table, gateway = gateway_server.tier_set.prices, gateway_server.gateway
    if isinstance(table, PriceTable):  # else the user's pipeline has its own prices
        table.override(prices)
    gateway.limits, gateway.fetch = request_limits(applied.limits), build_fetch(applied.limits)
    gateway.allowed_hosts = applied.gateway.allowed_hosts
    gateway.allowed_origins = applied.gateway.allowed_origins
    gateway.more_fields = frozenset(applied.limits.fields)
    gateway.completer.finish_seconds = applied.gateway.finish_seconds
    gateway.experiment = build_experiment(applied)
    gateway.access.defaults = key_defaults(applied)
    gateway_server.app.limit = applied.gateway.max_concurrent
    log.info("configuration reloaded; changed: %s", ", ".join(changed) or "nothing")
    if waiting := list(_changed(applied, new)):
        log.warning("changed settings that need a restart: %s", ", ".join(waiting))


def merged(old: Config, new: Config) -> Config:
    """Return the old configuration with the settings of the new one that need no restart."""
    sections: dict[str, Any] = {}
    for section, keys in RELOADED.items():
        values = {key: getattr(getattr(new, section), key) for key in keys}
        sections[section] = replace(getattr(old, section), **values)
    prices = {tier.name: tier.price for tier in new.tiers}
    tiers = tuple(replace(one, price=prices.get(one.name, one.price)) for one in old.tiers)
    return replace(old, tiers=tiers, **sections)


def _changed(old: Config, new: Config) -> Iterator[str]:
    """Yield the names of the settings that differ, such as `limits.images`."""
    before, after = _values(old), _values(new)
    if [tier.name for tier in old.tiers] != [tier.name for tier in new.tiers]:
        yield "tiers"
    yield from (name for name in before if name in after and before[name] != after[name])


def _values(config: Config) -> dict[str, object]:
    parts = {f"tiers.{tier.name}": tier for tier in config.tiers}
    parts |= {name: getattr(config, name) for name in SECTIONS}
    return {f"{part}.{name}": v for part, one in parts.items() for name, v in vars(one).items()}


def unmap_large_blocks() -> bool:
    """Make malloc map each block of 12 MB or more separately and unmap it when it is freed. Return
    whether the C library supports this.

    By default glibc raises this threshold to the largest block freed so far: after the first large
    image, the next ones come from heaps, where one small block above them keeps them allocated.
    orjson parses in a block of twelve times the body's length: with a threshold of 4 MB, each image
    of 500 kB faulted in new memory, which took a quarter of the CPU time of its request.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # A fixed threshold also ends the automatic one for trimming heaps. At its default of 128 kB,
    # each request with an image returned its body's memory, and the next one faulted it in again.
    # 8 MB is too little, because orjson's block is larger: most of the memory was returned.
    mallopt(M_TRIM_THRESHOLD, KEPT_AT_HEAP_END)
    # Each arena keeps so much, and by default the threads use up to eight for each core.
    mallopt(M_ARENA_MAX, ARENAS)
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
