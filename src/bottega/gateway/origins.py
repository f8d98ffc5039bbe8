"""Origin and host name checks of a gateway without keys."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

from bottega.gateway.refusals import Refusal

HERE = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")

PORT = re.compile(r":\d+\Z")


def check_host(host: str | None, allowed: Collection[str] = ()) -> None:
    """Raise `Refusal` for a host name that is neither loopback nor allowed.

    To a browser, a web page whose name resolves to 127.0.0.1 (DNS rebinding) has the same origin as
    the gateway: only the Host header distinguishes it from a local client.
    """
    if host is None:
        return
    name = PORT.sub("", host).lower().removesuffix(".")
    if not is_loopback(name) and name not in {one.lower() for one in allowed}:
        raise Refusal(
            f"a gateway without keys does not answer to the host name {name[:100]!r}",
            status=403,
            type="permission_error",
            code="host_forbidden",
            hint="use localhost, add the name to gateway.allowed_hosts, or bottega keys add NAME",
        )


def is_loopback(name: str) -> bool:
    """Return whether a host name without a port is `localhost` or a loopback address."""
    try:
        return ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return name == "localhost"


def check_origin(origin: str | None) -> None:
    """Browsers send what a page asks of loopback, only the answer they withhold: it would cost
    money, and teach the cache. What is no web page (an app, an extension) has other schemes.
    Raises `Refusal`."""
    if origin is None or HERE.fullmatch(origin):
        return
    if origin == "null" or origin.lower().startswith(("http://", "https://")):
        raise Refusal(
            "web pages of other hosts may not ask here without a key",
            status=403,
            type="permission_error",
            code="origin_forbidden",
            hint="bottega keys add NAME, and send the key",
        )
