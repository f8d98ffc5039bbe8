"""URLs of Milvus, and the connection to one of its databases, with translated errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from bottega.errors import (
    SettingError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    require_extra,
)

if TYPE_CHECKING:
    from pymilvus import MilvusClient

SCHEMES = {"milvus": "http", "milvus+tls": "https"}
PORT = 19530
SETTING = "vectors=, [cache] vectors or BOTTEGA_VECTORS"
EXAMPLE = "vectors='milvus://db.example:19530/default'"

ANSWER_SECONDS = 5.0
# Codes of the server
UNAVAILABLE = (1, 2)
FULL = (3, 7, 9)
BUSY = (4, 8)
ABSENT = (100, 101, 103)  # no such collection, or one that is not (fully) loaded
NO_DATABASE = 800
UNAUTHENTICATED = (1400, 1800)


class NotLoadedError(StoreError):
    """The collection does not exist, or the server has not loaded it."""


class MilvusDatabase:
    """Connection for several threads. It connects at first use, even after `close`. Methods raise
    `StoreError`, and `MissingDependencyError` without pymilvus."""

    def __init__(self, url: str) -> None:
        self._url = MilvusUrl.parse(url)
        self.name = self._url.name
        self._connected: MilvusClient | None = None
        self._lock = Lock()

    def names(self, prefix: str) -> list[str]:
        """Return the collections whose names begin with the prefix."""
        with self.client() as client:
            found = client.list_collections(timeout=ANSWER_SECONDS)
        return [name for name in found if name.startswith(prefix)]

    def drop(self, name: str) -> None:
        with self.client() as client:
            client.drop_collection(name, timeout=ANSWER_SECONDS)

    def close(self) -> None:
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            client.close()

    @contextmanager
    def client(self) -> Iterator[MilvusClient]:
        """Yield the client, and translate its errors into those of Bottega."""
        require_extra("pymilvus", "milvus")
        from grpc import RpcError
        from pymilvus import MilvusException

        try:
            yield self._connected or self._connect()
        except MilvusException as error:
            if error.code in ABSENT:
                raise NotLoadedError(
                    f"a collection of {self.name} is not loaded", hint="repeat the search"
                ) from error
            cause = error.__cause__
            raise self._translation(cause if isinstance(cause, RpcError) else error) from error
        except RpcError as error:
            raise self._translation(error) from error

    def _connect(self) -> MilvusClient:
        from pymilvus import MilvusClient

        # It logs every failed call with a traceback; failures are raised here.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with self._lock:
            if self._connected is None:
                # Dedicated: a shared connection ignores whether another URL asks for TLS.
                self._connected = MilvusClient(
                    uri=self._url.address,
                    token=self._url.token,
                    db_name=self._url.database,
                    timeout=ANSWER_SECONDS,
                    dedicated=True,
                )
            return self._connected

    def _translation(self, error: BaseException) -> StoreError:
        code: Any = getattr(error, "code", None)
        code = code() if callable(code) else code
        status = str(getattr(code, "name", ""))  # of gRPC
        if status == "UNAUTHENTICATED" or code in UNAUTHENTICATED:
            return StoreError(
                f"{self.name} rejects the user or the password",
                hint=f"correct the user and password, or the API key, in {SETTING}",
            )
        if code == NO_DATABASE:
            return StoreError(
                f"{self.name} does not exist",
                hint=f"create the database in Milvus, or correct its name in {SETTING}",
            )
        if code in FULL:
            return StoreFullError(
                f"{self.name} has no memory or disk left for vectors",
                hint="add memory or disk to Milvus; the examples in PostgreSQL are complete",
            )
        if code in BUSY:
            return StoreBusyError(
                f"{self.name} rejects requests above its rate limit",
                hint="try again later, or raise quotaAndLimits in the settings of Milvus",
            )
        if status or code in UNAVAILABLE:
            reason = status.lower().replace("_", " ") or "it is not ready"
            return StoreUnavailableError(
                f"{self.name} cannot be reached: {reason}",
                hint=f"start Milvus, or correct host and port in {SETTING}",
            )
        reason = str(getattr(error, "message", error)).split("\n")[0][:200]
        return StoreError(f"{self.name} failed: {reason}", hint="check the log of Milvus")


def is_milvus_url(text: str) -> bool:
    return urlsplit(text).scheme in SCHEMES


@dataclass(frozen=True)
class MilvusUrl:
    """Parts of `milvus://USER:PASSWORD@HOST:PORT/DATABASE`. `milvus+tls` encrypts the connection. A
    user without a password is an API key."""

    address: str  # for the client, without the token
    name: str  # for messages
    database: str
    token: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str) -> MilvusUrl:
        """Return the parts. Raises `SettingError`, whose message omits the URL, since it may
        contain a password."""
        try:
            parts = urlsplit(text)
            port = parts.port or PORT
        except ValueError as error:
            raise SettingError("vectors is not a valid URL", hint=f"use {EXAMPLE}") from error
        database = parts.path.strip("/")
        if parts.scheme not in SCHEMES or not parts.hostname or "/" in database:
            raise SettingError("vectors is not the URL of a Milvus server", hint=f"use {EXAMPLE}")
        if parts.query or parts.fragment:
            raise SettingError(
                "the URL of vectors must not have a query or fragment", hint=f"use {EXAMPLE}"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        secrets = [unquote(one) for one in (parts.username, parts.password) if one]
        return cls(
            f"{SCHEMES[parts.scheme]}://{host}:{port}",
            f"{parts.scheme}://{host}:{port}/{database or 'default'}",
            database or "default",
            ":".join(secrets),
        )
