"""Server-sent events: reading what an upstream streams, writing what a client gets."""

from __future__ import annotations

from bottega.errors import GarbledError

DONE = b"[DONE]"
LAST = b"data: [DONE]\n\n"
# No chunk of an answer comes near; a line without an end would fill the memory.
LONGEST_EVENT = 8 << 20
OF_A_LINE = 64
BOM = b"\xef\xbb\xbf"


def event(payload: bytes) -> bytes:
    """`payload` is JSON in one line."""
    return b"data: " + payload + b"\n\n"


class EventReader:
    """Bytes as they come to the data of each event, wherever the bytes are cut.

    Lines end with LF, CRLF or CR. Comments, ids, names and events without data are dropped. The
    lines of one event are joined by a space: for JSON that is as good as a line break, and such
    data can be written as one line again.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._data: list[bytes] = []
        self._held = 0  # bytes of the parts
        self._kept = 0  # bytes of the data, and what an empty line of it costs
        self._after_return = False
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._after_return:  # the other half of a CRLF
            chunk, self._after_return = chunk.removeprefix(b"\n"), False
        if not chunk:
            return []
        self._held += len(chunk)
        if self._held + self._kept > LONGEST_EVENT:
            raise self._too_long()
        self._parts.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        return self._lines(b"".join(self._parts))

    def end(self) -> list[bytes]:
        """What the last event holds if the stream ends without an empty line."""
        return self._lines(b"".join(self._parts) + b"\n\n")

    def _lines(self, text: bytes) -> list[bytes]:
        if not self._begun:
            text, self._begun = text.removeprefix(BOM), True
        self._after_return = text.endswith(b"\r")
        lines = text.splitlines()
        rest = b"" if text.endswith((b"\n", b"\r")) else lines.pop()
        self._parts = [rest] if rest else []
        events = [data for line in lines if (data := self._line(line)) is not None]
        self._held = len(rest)
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._kept = self._data, [], 0
            return b" ".join(data) if any(data) else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._kept += len(value) + OF_A_LINE
        return None

    def _too_long(self) -> GarbledError:
        error = GarbledError(
            f"{self._where} sent an event of more than {LONGEST_EVENT >> 20} MB",
            hint="does this server speak the OpenAI chat-completions protocol?",
        )
        error.retryable = False  # it would only be read again
        return error
