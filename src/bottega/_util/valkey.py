"""Clients for Valkey and Redis, with translated errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bottega.errors import (
    SettingError,
    StoreBusyError,
    StoreError,
    StoreUnavailableError,
    require_extra,
)

if TYPE_CHECKING:
    from valkey.asyncio import Valkey

SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://")
ANSWER_SECONDS = 2.0
MAX_CONNECTIONS = 50


def is_valkey_url(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEMES)


def display_valkey_url(url: str) -> str:
    """Return host, port and database of a URL, without user, password and options."""
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError as error:
        raise SettingError(
            "the port of a Redis URL must be a number up to 65535",
            hint="write redis://host:6379/0",
        ) from error
    if "@" in parts.path + parts.query + parts.fragment:
        raise SettingError(
            "the user or password of a Redis URL contains a / ? or #",
            hint="write redis://user:password@host:6379/0; %2F stands for / and %40 for @",
        )
    return f"redis://{parts.hostname or 'localhost'}:{port}/{parts.path.lstrip('/') or 0}"


def valkey_client(url: str) -> Valkey:
    """Return a client for one event loop, which connects at first use. A command is retried once if
    its connection was lost, for example by a restart of the server. Raises
    `MissingDependencyError`."""
    require_extra("valkey", "shared")
    from valkey.asyncio import BlockingConnectionPool, Valkey
    from valkey.asyncio.retry import Retry
    from valkey.backoff import NoBackoff
    from valkey.exceptions import ConnectionError

    with valkey_errors(display_valkey_url(url)):
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[ConnectionError],
        )
        return Valkey.from_pool(pool)


@contextmanager
def valkey_errors(name: str) -> Iterator[None]:
    """Translate errors of the client and of the network into those of Bottega."""
    from valkey.exceptions import AuthenticationError, BusyLoadingError, ResponseError, ValkeyError

    try:
        yield
    except (AuthenticationError, ValueError) as error:
        raise StoreError(
            f"{name} rejects the user, the password or the options of its URL",
            hint="correct the URL in state.redis or its environment variable",
        ) from error
    except BusyLoadingError as error:
        raise StoreBusyError(
            f"{name} is loading its data", hint="try again when it has loaded"
        ) from error
    except ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            raise StoreError(
                f"{name} rejects the user or the password",
                hint="correct the URL in state.redis or its environment variable",
            ) from error
        raise StoreBusyError(f"{name} refuses a command: {error}", hint="check its log") from error
    except (ValkeyError, OSError, TimeoutError) as error:
        raise StoreUnavailableError(
            f"{name} cannot be reached: {type(error).__name__}",
            hint="start the server, or correct host and port in state.redis",
        ) from error
