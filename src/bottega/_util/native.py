"""Native libraries and models: memory, one load at a time, and one hub request."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bottega.errors import SettingError

GB = 10**9
HUB_TIMEOUT = 10.0  # seconds
WITH_FAISS, WITH_TORCH = GB, 2 * GB
PER_THREAD = 150 * 10**6

T = TypeVar("T")


def check_address_space(needed: int = WITH_FAISS) -> None:
    """Raise `SettingError` if the limit is lower than `needed` bytes."""
    limit = _limit()
    if limit is not None and limit < needed:
        raise SettingError(
            f"address space must be at least {needed / GB:.1f} GB, got {limit / GB:.1f} GB",
            hint="raise the limit of this shell: ulimit -v unlimited",
        )


def address_space_warning() -> str | None:
    """Return a warning if threads of native libraries may exceed the limit, else None."""
    limit, threads = _limit(), _threads()
    enough = WITH_TORCH + PER_THREAD * threads
    if limit is None or limit >= enough:
        return None
    return (
        f"address space is limited to {limit / GB:.1f} GB, but {threads} threads need up to"
        f" {enough / GB:.1f} GB; below that, native libraries crash or hang without a message;"
        " run ulimit -v unlimited, or export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1"
    )


def return_freed_memory() -> None:
    """Return free pages of malloc's heaps to the system. Does nothing without glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    trim(0)


def _limit() -> int | None:
    """Return the soft limit in bytes, None if unlimited."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _threads() -> int:
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() and int(setting) else os.cpu_count() or 1


# transformers changes torch for the whole process while it loads a model, and a second model loaded
# meanwhile misses some of its weights. Two threads that import it at once get a partial module.
LOADING = threading.RLock()  # reentrant: an embedder may load others


def load_from_hub(source: str, load: Callable[[bool], T]) -> T:
    """Return `load(local_files_only)` from a folder or the cache, or else from the hub.

    One short request checks the hub first: the libraries retry an unreachable hub for minutes.
    """
    import huggingface_hub

    try:
        return load(True)
    except (OSError, ValueError):  # not cached; report the error of the hub instead
        if Path(source).exists():
            raise
    huggingface_hub.HfApi().model_info(source, timeout=HUB_TIMEOUT)
    return load(False)
