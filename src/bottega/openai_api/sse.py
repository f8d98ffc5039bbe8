"""Server-sent events: reader and writer."""

from __future__ import annotations

from bottega.errors import GarbledError
from bottega.openai_api.errors import WRONG_PROTOCOL

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
# No chunk of an answer comes near; a line without an end would fill the memory.
MAX_EVENT = 8 << 20
LINE_OVERHEAD = 64
BOM = b"\xef\xbb\xbf"


def to_event(payload: bytes) -> bytes:
    """Return the event of a payload, which must be JSON in one line."""
    return b"data: " + payload + b"\n\n"


class EventReader:
    """Reader that turns bytes, split anywhere, into the data of each event.

    Lines end with LF, CRLF or CR. Comments, ids, names and events without data are dropped. The
    lines of one event are joined by a space, which is equivalent to a line break in JSON, so such
    data can be written as one line again.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._data: list[bytes] = []
        self._part_bytes = 0
        self._data_bytes = 0  # with the overhead of each line, even an empty one
        self._after_return = False
        self._has_begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that this chunk completes. Raises `GarbledError`."""
        if self._after_return:  # the second half of a CRLF
            chunk, self._after_return = chunk.removeprefix(b"\n"), False
        if not chunk:
            return []
        self._part_bytes += len(chunk)
        if self._part_bytes + self._data_bytes > MAX_EVENT:
            raise self._too_long()
        self._parts.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        return self._lines(b"".join(self._parts))

    def end(self) -> list[bytes]:
        """Return the data of the last event if the stream ends without an empty line."""
        return self._lines(b"".join(self._parts) + b"\n\n")

    def _lines(self, text: bytes) -> list[bytes]:
        if not self._has_begun:
            text, self._has_begun = text.removeprefix(BOM), True
        self._after_return = text.endswith(b"\r")
        lines = text.splitlines()
        rest = b"" if text.endswith((b"\n", b"\r")) else lines.pop()
        self._parts = [rest] if rest else []
        events = [data for line in lines if (data := self._line(line)) is not None]
        self._part_bytes = len(rest)
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._data_bytes = self._data, [], 0
            return b" ".join(data) if any(data) else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + LINE_OVERHEAD
        return None

    def _too_long(self) -> GarbledError:
        error = GarbledError(
            f"{self._where} sent an event of more than {MAX_EVENT >> 20} MB", hint=WRONG_PROTOCOL
        )
        error.retryable = False  # the next attempt would read it again
        return error
