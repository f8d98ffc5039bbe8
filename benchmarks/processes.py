"""Server processes on loopback, their figures from Linux, and clocks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """Return CPU seconds of the process and its children, ended ones included."""
        return sum(cpu_of(pid) for pid in tree(self.process.pid))

    def resident(self) -> int:
        """Return resident memory in bytes."""
        return sum(_resident(pid) for pid in tree(self.process.pid))

    def threads(self) -> int:
        return sum(len(_listed(f"/proc/{pid}/task")) for pid in tree(self.process.pid))

    def sockets(self) -> int:
        pids = tree(self.process.pid)
        return sum(
            _target(link).startswith("socket:")
            for pid in pids
            for link in _listed(f"/proc/{pid}/fd")
        )

    def stop(self, seconds: float = 10) -> int:
        """Stop the process and return its exit status; kill it after a timeout."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        for pid in reversed(tree(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class DidNotStartError(Exception):
    pass


def start(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Server:
    """Start a process; use `await_port` to wait until it is ready."""
    surroundings = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=surroundings, stdout=output, stderr=output
        )
    return Server(process, port, log)


def uvicorn(app: str, port: int) -> list[str]:
    """Return the fastest uvicorn command: one worker, uvloop, httptools, no access log."""
    fast = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--workers", "1"]
    return [
        sys.executable,
        "-m",
        "uvicorn",
        app,
        "--port",
        str(port),
        "--log-level",
        "warning",
        *fast,
    ]


@contextlib.contextmanager
def stopping(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def await_port(server: Server, seconds: float) -> Server:
    """Wait for the port. Raises `DidNotStartError` with the end of the process's output."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1):
            return server
        time.sleep(0.05)
    server.stop()
    raise DidNotStartError(server.log.read_text(errors="replace")[-2000:])


def await_ready(server: Server) -> None:
    """Wait until a gateway has loaded its models. Raises `DidNotStartError`."""
    await_port(server, STARTS)
    until = time.monotonic() + STARTS
    while time.monotonic() < until and server.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/readyz"):
            return
        time.sleep(0.05)
    raise DidNotStartError(server.log.read_text(errors="replace")[-2000:])


def tree(pid: int) -> list[int]:
    """Return the process and its descendants."""
    below = [
        child
        for task in _listed(f"/proc/{pid}/task")
        for number in _read(task / "children").split()
        for child in tree(int(number))
    ]
    return [pid, *below]


def cpu_of(pid: int) -> float:
    """Return CPU seconds of a process and its ended children."""
    after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(int(ticks) for ticks in after_name[11:15]) / TICK


def _resident(pid: int) -> int:
    return int((_read(Path(f"/proc/{pid}/statm")).split() or ["0", "0"])[1]) * PAGE


def _read(path: Path) -> str:
    """Read a file of /proc; "" if the process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _listed(folder: str) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


STARTS = 90.0
"""Seconds."""
BOTTEGA = [sys.executable, "-m", "bottega"]


def serve(
    config: Path,
    port: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
    *options: str,
) -> Server:
    """Start the gateway and return once it accepts connections."""
    command = [*BOTTEGA, "serve", "--config", str(config), *options]
    server = start(command, port, log, environment)
    return await_port(server, STARTS)


UNLIMITED = ("--tiers", "*", "--max-concurrent", "256")


def new_key(data: Path, name: str, namespace: str, *options: str) -> str:
    command = [*BOTTEGA, "keys", "add", name, "--data", str(data), "--namespace", namespace]
    command += options
    surroundings = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    made = subprocess.run(
        [*command, "--json"], env=surroundings, capture_output=True, text=True, check=True
    )
    return str(json.loads(made.stdout)["key"])


SCHEDULED = Path("/proc/thread-self/schedstat")  # Linux


def clocks() -> tuple[float, float]:
    """Return seconds, and seconds without those in which this thread was ready but had no core. On
    a busy machine a synchronization ends with such a wait, of up to a scheduler tick.
    """
    waited = 0.0
    if SCHEDULED.exists():
        waited = int(SCHEDULED.read_text().split()[1]) / 1e9
    now = time.perf_counter()
    return now, now - waited


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, awake = clocks()
    return wall - start[0], awake - start[1]
