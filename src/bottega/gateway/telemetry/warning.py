"""What goes wrong behind answers that are given all the same: told once, and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bottega.errors import BottegaError

log = logging.getLogger(__name__)


class Warn:
    """An error's message may quote the client, and a client may cause it all day: its kind is
    logged, once, and `count` is told each time."""

    def __init__(self, count: Callable[[str], None] = lambda what: None) -> None:
        self._count = count
        self._told: set[tuple[str, str]] = set()

    def __call__(self, what: str, error: BottegaError | None = None) -> None:
        self._count(what)
        kind = "" if error is None else type(error).__name__
        if (what, kind) not in self._told:
            self._told.add((what, kind))
            log.warning(
                "%s: %s (told once; bottega_warnings_total counts)", what, kind or "see above"
            )
