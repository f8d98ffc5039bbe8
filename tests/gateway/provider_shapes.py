"""Shapes of providers from `provider_shapes.toml`, and one endpoint that plays them all."""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

BOM = "\\ufeff"
NAMED = re.compile(rb"shape (\d+)\b")
LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


@dataclass(frozen=True)
class Shape:
    """One shape; the head of the data file describes the fields."""

    provider: str
    name: str
    teaches: str
    body: str = ""
    stream: str = ""
    status: int = 200
    kind: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    newline: str = "\n"
    pieces: int = 0
    gzip: bool = False
    fill: int = 0
    end: str = ""
    error: int = 0
    says: str = ""
    read: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.provider}: {self.name}"

    @property
    def payload(self) -> bytes:
        text = self.stream or self.body
        if text.startswith(BOM):
            text = "\N{BYTE ORDER MARK}" + text.removeprefix(BOM)
        deep = "[" * -self.fill + "]" * -self.fill
        text = text.replace("FILL", deep or "x" * self.fill)
        return text.replace("\n", self.newline).encode()

    @property
    def response(self) -> tuple[bytes, list[bytes]]:
        """The head of the HTTP response, and the pieces of its body."""
        payload = gzip.compress(self.payload) if self.gzip else self.payload
        kind = self.kind or ("text/event-stream" if self.stream else "application/json")
        headers = {"Content-Type": kind, "Transfer-Encoding": "chunked", **self.headers}
        if self.gzip:
            headers["Content-Encoding"] = "gzip"
        reason = HTTPStatus(self.status).phrase if self.status in set(HTTPStatus) else "Other"
        lines = [f"HTTP/1.1 {self.status} {reason}", *(f"{a}: {b}" for a, b in headers.items())]
        size = self.pieces or max(len(payload), 1)
        pieces = [payload[at : at + size] for at in range(0, len(payload), size)]
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        end = [] if self.end else [b"0\r\n\r\n"]
        return "\r\n".join([*lines, "", ""]).encode(), [*chunks, *end]


def load_shapes() -> list[Shape]:
    path = Path(__file__).with_suffix(".toml")
    return [Shape(**one) for one in tomllib.loads(path.read_text("utf-8"))["shape"]]


SHAPES = load_shapes()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests whose text names the number of a shape."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            named = NAMED.search(body)
            assert named is not None, body
            shape = SHAPES[int(named[1])]
            start, pieces = shape.response
            writer.write(start)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if shape.end:
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


@contextmanager
def playing_shapes() -> Iterator[str]:
    """Yield the base URL of an endpoint that plays the shapes."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_serve, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        server.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
