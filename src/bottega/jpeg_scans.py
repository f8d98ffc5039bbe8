"""Checks of a JPEG header: the markers up to the first scan."""

from __future__ import annotations

import re
from collections.abc import Iterator

START_OF_SCAN = 0xDA
END_OF_FILE = -1
NOT_FRAMES = {0xC4, 0xC8, 0xCC}  # tables and an extension, between the markers of frames
SEQUENTIAL = {0xC0, 0xC1, 0xC9}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD8)}
FILL = re.compile(rb"\xff+")  # any number of fill bytes may precede a marker
# Pillow reads the bytes between segments one by one in Python: 16 KB take it about 15 ms.
MOST_STEPS = 1 << 14


def has_several_scans(data: bytes) -> bool:
    """Return whether libjpeg holds the coefficients of the whole image: the frame is progressive,
    or its first scan lacks a component. True also if the first scan cannot be read."""
    components, sequential = 0, False
    for marker, at, _ in _markers(data):
        segment = data[at : at + 8]
        if len(segment) < 8:
            break
        if marker == START_OF_SCAN:
            return not sequential or segment[2] < components
        if 0xC0 <= marker <= 0xCF and marker not in NOT_FRAMES:
            components, sequential = segment[7], marker in SEQUENTIAL
    return True


def is_header_slow(data: bytes) -> bool:
    """Return whether markers, and bytes between segments, before the first scan are more than
    `MOST_STEPS` together."""
    steps = 0
    for _, _, skipped in _markers(data):
        steps += 1 + skipped
        if steps > MOST_STEPS:
            return True
    return False


def _markers(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the markers up to the first scan: their code, the position after them, and the number
    of bytes skipped before them. Without a scan, the end of the file is the last marker."""
    at = 2
    while (fill := FILL.search(data, at)) and fill.end() < len(data):
        marker, content = data[fill.end()], fill.end() + 1
        yield marker, content, content - at - 2
        if marker == START_OF_SCAN:
            return
        length = (
            0 if marker in WITHOUT_LENGTH else int.from_bytes(data[content : content + 2], "big")
        )
        at = content + length
    yield END_OF_FILE, len(data), len(data) - at
