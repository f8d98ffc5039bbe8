"""aiohttp, imported at first use: most commands send no HTTP request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        import aiohttp

        return getattr(aiohttp, name)
