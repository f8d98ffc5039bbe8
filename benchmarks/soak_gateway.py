"""`bottega` for benchmarks/soak_mixed.py: python -m benchmarks.soak_gateway FIGURES PORT serve ...

It fetches images from loopback at PORT, has lower bounds where no setting exists, and writes to
FIGURES how full its caches are when FIGURES.wanted appears.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega._util.caching import LRUCache
from bottega.cli import main
from bottega.gateway.request import chat, rejections
from bottega.gateway.request.image_fetcher import ImageFetcher
from bottega.gateway.running import build
from bottega.gateway.telemetry import logs
from bottega.knowledge.sqlite import search as sqlite_search
from bottega.openai_api import request

LOOPBACK = "127.0.0.1"
UNBOUNDED = -1
CachedCall = functools._lru_cache_wrapper


def lower_bounds() -> None:
    """Lower the bounds that half an hour of moderate load would not reach."""
    request.KEEP_ENCODED = 256 << 10
    rejections.MAX_REMEMBERED = 500
    logs.CACHED_TEXTS = 64
    # Deleted examples that each open knowledge base may keep.
    sqlite_search.SPARE = 20  # type: ignore[attr-defined]
    chat.lru_cache = lambda bound: functools.lru_cache(min(bound, 128))  # type: ignore[assignment,attr-defined]


def write_figures(file: Path) -> None:
    """Write the figures whenever another process wants them."""
    wanted = file.with_suffix(".wanted")
    while True:
        time.sleep(0.2)
        if wanted.exists():
            # The gateway freezes the objects of its start. They are not frozen again: garbage among
            # frozen objects is never collected.
            gc.unfreeze()
            gc.collect()
            objects = gc.get_objects()
            kinds = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in objects)
            found = {"caches": caches(objects), "objects": dict(kinds.most_common(300))}
            del objects
            file.write_text(json.dumps(found))
            wanted.unlink()


def caches(objects: list[Any]) -> dict[str, tuple[int, int]]:
    """Return size and bound of all caches of the project by owner and name; those of equal owners
    are added."""
    found: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    for owner in objects:
        for name, value in _values(owner):
            if isinstance(value, LRUCache):
                size, bound = value.size, value._max_size
            elif isinstance(value, CachedCall):
                info = value.cache_info()
                size, bound = info.currsize, UNBOUNDED if info.maxsize is None else info.maxsize
            else:
                continue
            if id(value) in seen:  # one object may have several names
                continue
            seen.add(id(value))
            before = found.get(name, (0, 0))
            found[name] = (before[0] + size, before[1] + bound)
    return found


def _values(owner: object) -> Iterator[tuple[str, object]]:
    """Yield the named values that an object or a closure of the project holds."""
    if isinstance(owner, types.FunctionType) and _is_own(owner):
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            try:
                yield f"{owner.__qualname__}: {name}", cell.cell_contents
            except ValueError:  # not set yet
                continue
    elif isinstance(owner, CachedCall) and _is_own(owner):
        name = str(getattr(owner, "__qualname__", ""))
        if "<locals>" not in name and "<lambda>" not in name:  # else its owner has it, too
            yield name, owner
    elif _is_own(type(owner)):
        names = (*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ()))
        for name in names:
            yield f"{type(owner).__name__}.{name}", getattr(owner, name, None)


def _is_own(one: object) -> bool:
    """Return whether the project defines this function or type."""
    return str(getattr(one, "__module__", "")).startswith("bottega")


if __name__ == "__main__":
    figures, port = Path(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    fetcher = functools.partial(
        ImageFetcher, ports=[port], allowed=lambda address: address == LOOPBACK
    )
    build.ImageFetcher = fetcher  # type: ignore[attr-defined,assignment]
    lower_bounds()
    threading.Thread(target=write_figures, args=[figures], daemon=True).start()
    main()
