"""The number of scans of a JPEG file, from the markers before its first scan."""

from __future__ import annotations

START_OF_SCAN = 0xDA
NOT_FRAMES = {0xC4, 0xC8, 0xCC}  # tables and an extension, between the markers of frames
SEQUENTIAL = {0xC0, 0xC1, 0xC9}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD8)}


def has_several_scans(data: bytes) -> bool:
    """Return whether libjpeg holds the coefficients of the whole image: the frame is progressive,
    or its first scan lacks a component. A file without a readable first scan counts as such."""
    components, sequential, at = 0, False, 2
    while (at := data.find(b"\xff", at)) >= 0:
        while data[at : at + 1] == b"\xff":  # fill bytes
            at += 1
        segment = data[at : at + 9]
        if len(segment) < 9:
            break
        marker, at = segment[0], at + 1
        if marker in WITHOUT_LENGTH:
            continue
        if marker == START_OF_SCAN:
            return not sequential or segment[3] < components
        if 0xC0 <= marker <= 0xCF and marker not in NOT_FRAMES:
            components, sequential = segment[8], marker in SEQUENTIAL
        at += int.from_bytes(segment[1:3], "big")
    return True
