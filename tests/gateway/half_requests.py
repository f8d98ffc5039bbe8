"""Requests on raw sockets whose bodies may stall, and their replies."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def begin(
    url: str, method: str, path: str, headers: dict[str, str], length: int | None, sent: bytes
) -> socket.socket:
    """Send the beginning of a request whose body has `length` bytes; chunked if None."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    client = socket.create_connection((address.hostname, address.port), timeout=60)
    size = {"content-length": str(length)}
    if length is None:
        size, sent = {"transfer-encoding": "chunked"}, b"%x\r\n%b\r\n" % (len(sent), sent)
    fields = {"host": address.netloc, "connection": "close", **headers, **size}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    client.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + sent)
    return client


def send_chunk(client: socket.socket, piece: bytes) -> None:
    """Send a piece of a chunked body; an empty one ends it."""
    client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))


def reply(client: socket.socket) -> tuple[int, str]:
    """Read until the gateway closes the connection. Return status and body."""
    received = b""
    with client:
        while piece := client.recv(1 << 16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
