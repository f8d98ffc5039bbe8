"""Load of benchmarks/gateway.py, in a separate process because its work is not measured. It reads a
`Work` as a line of JSON and writes a `LoadResult`.

Sockets stay open. Each request writes its number into the slots of its body: all requests differ,
or `variants` of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

DIGITS = 8


@dataclass(frozen=True)
class Work:
    port: int
    headers: Mapping[str, str]
    body: str
    """The path of its file."""
    slots: tuple[int, ...]
    variants: int | None
    first: int
    """The number of the first request: what one run has sent is new to no later one."""
    concurrency: int
    seconds: float
    most: int
    expected: str
    """Part of every right reply."""
    path: str = "/v1/chat/completions"
    pause: float = 0.0
    """Seconds between a reply and the next request of its connection."""


@dataclass
class Times:
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    example: str = ""

    def seen(self, seconds: float) -> LoadResult:
        times = np.array(self.latencies or [np.nan])
        p50, p99 = np.percentile(times, [50, 99])
        done, longest = len(self.latencies), float(times.max())
        return LoadResult(seconds, done, float(p50), float(p99), longest, self.errors, self.example)


@dataclass(frozen=True)
class LoadResult:
    """Result of a load run, in seconds; `example` is the beginning of the first wrong reply."""

    seconds: float
    done: int
    p50: float
    p99: float
    longest: float
    errors: int
    example: str


class Bodies:
    def __init__(self, work: Work) -> None:
        self._template = bytearray(Path(work.body).read_bytes())
        self._work, self._next = work, work.first
        head = f"POST {work.path} HTTP/1.1\r\nhost: 127.0.0.1:{work.port}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in work.headers.items())
        length = len(self._template)
        self._head = f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n"

    def draw(self) -> bytes:
        number, variants = self._next, self._work.variants
        self._next += 1
        written = b"%0*d" % (DIGITS, number if variants is None else number % variants)
        for slot in self._work.slots:
            self._template[slot : slot + DIGITS] = written
        return self._head.encode() + self._template


class Connection(asyncio.Protocol):
    """Client connection with one reply at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._read = bytearray()
        self._whole: int | None = None
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    async def ask(self, request: bytes) -> bytes:
        self._read.clear()
        self._whole = None
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._reply

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self._whole is None:
            self._whole = length(self._read)
        ended = (
            self._read.endswith(b"0\r\n\r\n")
            if self._whole == -1
            else self._whole is not None and len(self._read) >= self._whole
        )
        if ended and not self._reply.done():
            self._reply.set_result(bytes(self._read))

    def connection_lost(self, problem: Exception | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(problem or ConnectionError("closed before the reply"))


def length(read: bytearray) -> int | None:
    """Return the length of the whole reply; -1 for chunks, None while it is unknown."""
    end = read.find(b"\r\n\r\n")
    if end < 0:
        return None
    for line in bytes(read[:end]).lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return end + 4 + int(line.split(b":")[1])
    return -1


async def drive(work: Work) -> LoadResult:
    times, bodies = Times(), Bodies(work)
    started = time.perf_counter()
    await asyncio.gather(
        *(client(work, bodies, times, started + work.seconds) for _ in range(work.concurrency))
    )
    return times.seen(time.perf_counter() - started)


async def client(work: Work, bodies: Bodies, times: Times, until: float) -> None:
    expected, connection = work.expected.encode(), None
    while time.perf_counter() < until and len(times.latencies) + times.errors < work.most:
        request = bodies.draw()
        try:
            if connection is None:
                connection = await connect(work.port)
            start = time.perf_counter()
            reply = await connection.ask(request)
        except OSError as problem:
            reply, connection = repr(problem).encode(), None
        if reply.startswith(b"HTTP/1.1 200") and expected in reply:
            times.latencies.append(time.perf_counter() - start)
        else:
            times.errors += 1
            times.example = times.example or reply[:600].decode(errors="replace")
        if work.pause:
            await asyncio.sleep(work.pause)
    if connection is not None:
        connection.transport.close()


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Connection, "127.0.0.1", port))[1]


def parse(line: str) -> Work:
    held: dict[str, Any] = json.loads(line)
    return Work(**(held | {"slots": tuple(held["slots"])}))


def main() -> None:
    for line in sys.stdin:
        seen = uvloop.run(drive(parse(line)))
        print(json.dumps(asdict(seen)), flush=True)


if __name__ == "__main__":
    main()
