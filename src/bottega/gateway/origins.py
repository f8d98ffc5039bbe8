"""Checks of `Origin` and `Host` by a gateway without keys."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

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
    name = host_name(host)
    if not is_loopback(name) and name not in map(host_name, allowed):
        raise ApiError(
            f"a gateway without keys does not answer to the host name {name[:100]!r}",
            status=403,
            type="permission_error",
            code="host_forbidden",
            hint="use localhost, add the name to gateway.allowed_hosts, or run bottega keys add"
            " NAME and restart the gateway",
        )


def is_loopback(name: str) -> bool:
    """Return whether a normalized name is `localhost` or a loopback address."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_origin(origin: str | None, allowed: Collection[str] = ()) -> None:
    """Raise `ApiError` for a web page whose host is neither loopback nor allowed.

    Browsers send such requests and hide only the responses, so the requests would still cost money
    and fill the cache. Apps and extensions have other schemes than http and https.
    """
    if origin is None:
        return
    scheme, _, host = origin.lower().partition("://")
    name = host_name(host)
    is_known = is_loopback(name) or name in map(host_name, allowed)
    is_foreign = scheme in ("http", "https") and not is_known
    if origin == "null" or is_foreign:
        raise ApiError(
            "web pages of other hosts may not ask here without a key",
            status=403,
            type="permission_error",
            code="origin_forbidden",
            hint="run bottega keys add NAME, restart the gateway, and send the key",
        )


def _address(host: str) -> str | None:
    """Return the normalized IP address, or None for a name."""
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    # Python before 3.13 does not count ::ffff:127.0.0.1 as loopback.
    return str(getattr(address, "ipv4_mapped", None) or address)
