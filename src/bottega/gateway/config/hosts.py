"""Hosts and origins from which requests may come."""

from __future__ import annotations

import re
from collections.abc import Collection

from bottega.openai_api.endpoint import is_loopback, parse_address
from bottega.openai_api.errors import ApiError

PORT = re.compile(r":\d*\Z")


def has_port(host: str) -> bool:
    """Return whether a host ends in a port. An IPv6 address without brackets has none."""
    return _address(host) is None and PORT.search(host) is not None


def host_name(host: str) -> str:
    """Return the normalized name or IP address of a host, without its port."""
    name = PORT.sub("", host) if has_port(host) else host
    name = name.lower().removesuffix(".")
    return _address(name) or name


def check_host(host: str | None, allowed: Collection[str] = ()) -> None:
    """Raise `ApiError` for a host name that is neither loopback nor allowed.

    To a browser, a web page whose name resolves to 127.0.0.1 (DNS rebinding) has the same origin as
    the gateway: only the Host header distinguishes it from a local client.
    """
    if host is None:
        return
    if not _is_local(host, allowed):
        raise ApiError(
            f"the host name is not allowed, got {host_name(host)[:100]!r}",
            status=403,
            code="host_forbidden",
            hint="use localhost or add the name to gateway.allowed_hosts; for the API, run bottega"
            " keys add NAME and restart the gateway: with keys it accepts every name",
        )


def _is_local(host: str, allowed: Collection[str]) -> bool:
    """Return whether a host is `localhost`, a loopback address or one of `allowed`."""
    name = host_name(host)
    return is_loopback(name) or name in map(host_name, allowed)


def check_origin(
    origin: str | None, allowed: Collection[str] = (), origins: Collection[str] = ()
) -> None:
    """Raise `ApiError` for a web page whose origin is not in `origins` and whose host is neither
    loopback nor allowed.

    Browsers send such requests and hide only the responses, so the requests would still cost money
    and fill the cache. Apps and extensions have other schemes than http and https.
    """
    if origin is None or origin in origins:
        return
    scheme, _, host = origin.lower().partition("://")
    if origin == "null" or (scheme in ("http", "https") and not _is_local(host, allowed)):
        raise ApiError(
            f"web pages of other hosts need an API key, got the origin {origin[:100]!r}",
            status=403,
            code="origin_forbidden",
            hint="add the origin to gateway.allowed_origins, or run bottega keys add NAME, restart"
            " the gateway, and send the key",
        )


def _address(host: str) -> str | None:
    """Return the normalized IP address, or None for a name."""
    address = parse_address(host.removeprefix("[").removesuffix("]"))
    # Python before 3.13 does not count ::ffff:127.0.0.1 as loopback.
    return None if address is None else str(getattr(address, "ipv4_mapped", None) or address)
