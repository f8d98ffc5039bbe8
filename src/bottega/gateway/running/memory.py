"""Memory that was freed goes back to the operating system."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # malloc.h of glibc
BLOCK = 1 << 20


def return_large_blocks() -> bool:
    """Have blocks of a megabyte and more mapped one by one, and so unmapped when they are freed.
    True if the C library can do so.

    glibc raises this threshold to the largest block that was freed so far: after the first large
    image the next ones come from heaps, in which one small block above them keeps them for good.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, BLOCK))
