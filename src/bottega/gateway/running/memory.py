"""Return of freed memory to the operating system."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # malloc.h of glibc
BLOCK = 1 << 20


def return_large_blocks() -> bool:
    """Make malloc map each block of 1 MB or more separately and unmap it when it is freed. Return
    whether the C library supports this.

    By default glibc raises this threshold to the largest block freed so far: after the first large
    image, the next ones come from heaps, where one small block above them keeps them allocated.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, BLOCK))
