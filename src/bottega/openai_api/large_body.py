"""Bodies of large requests, in a module of its own because their base class needs aiohttp."""

from __future__ import annotations

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

PIECE = 1 << 18


class LargeBody(Payload):
    """Body that is written in pieces, without the copies of `aiohttp.payload.BytesIOPayload`."""

    _value: bytes

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        body = memoryview(self._value)
        for start in range(0, len(body), PIECE):
            await writer.write(body[start : start + PIECE])  # waits while the server reads slowly
