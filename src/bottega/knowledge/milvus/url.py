"""URLs of Milvus servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from bottega.errors import SettingError

SCHEMES = {"milvus": "http", "milvus+tls": "https"}
PORT = 19530
SETTING = "vectors=, [cache] vectors or BOTTEGA_VECTORS"
EXAMPLE = "vectors='milvus://db.example:19530/default'"


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
