"""Access to the gateway: hosts and origins of requests, tiers and namespaces of keys."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError
from bottega.openai_api.transport import is_loopback, parse_address

PORT = re.compile(r":\d*\Z")
ALL = "*"  # every tier
# All requests without a key share it, so it has no limits of its own.
ANONYMOUS = Account("", "anonymous", max_concurrent=sys.maxsize, tiers=(ALL,))


@dataclass(frozen=True)
class KeyDefaults:
    """Limits of keys that were created without their own."""

    max_concurrent: int = 128
    tiers: tuple[str, ...] = ()
    max_namespaces: int = 16


@dataclass
class Access:
    """Checker of the limits of keys. Use it from the event loop; it counts the requests of this
    process only. `claim` records that an account uses a namespace, up to a maximum number of them;
    it returns False at the maximum, and blocks."""

    claim: Callable[[str, str, int], bool] = lambda account, namespace, limit: True
    defaults: KeyDefaults = field(default_factory=KeyDefaults)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _claimed: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, account: Account) -> None:
        """Count a request of the key; call `leave` when it ends. Raises `ApiError` (429)."""
        limit = account.max_concurrent or self.defaults.max_concurrent
        if self._in_flight[account.id] >= limit:
            raise ApiError(
                f"this key has reached its limit of concurrent requests, {limit}",
                status=429,
                type="rate_limit_error",
                code="too_many_concurrent_requests",
                headers={"retry-after": "1"},
                hint="wait until one ends, or ask the operator for a higher limit",
            )
        self._in_flight[account.id] += 1

    def leave(self, account: Account) -> None:
        self._in_flight[account.id] -= 1
        if self._in_flight[account.id] <= 0:
            del self._in_flight[account.id]

    def tiers_of(self, account: Account) -> tuple[str, ...]:
        if account.admin:
            return (ALL,)
        return self.defaults.tiers if account.tiers is None else account.tiers

    def may_choose(self, account: Account, tier: str) -> bool:
        chosen = self.tiers_of(account)
        return tier in chosen or ALL in chosen

    def may_reach(self, account: Account, tier: str) -> bool:
        """Return whether the gateway may send a request with tools, audio or no question to the
        tier. All tiers are allowed unless the operator has set tiers for the key or as a default:
        the built-in default, none, limits only the choices of clients."""
        return (not self.tiers_of(account) and account.tiers is None) or self.may_choose(
            account, tier
        )

    def check_tiers(self, account: Account, tiers: Collection[str]) -> None:
        """Raise `ApiError` (403) for a tier that the key may not choose."""
        for tier in tiers:
            if not self.may_choose(account, tier):
                raise ApiError(
                    f"this key may not choose the tier {tier!r}",
                    status=403,
                    type="permission_error",
                    code="tier_forbidden",
                    hint="use the model bottega, or ask the operator for a key with --tiers",
                )

    async def check_namespace(self, account: Account, namespace: str) -> None:
        """Raise `ApiError` (403) if the key may use no further namespace."""
        claimed = (account.id, namespace)
        # An empty id is no key, so there is nothing to count.
        if account.admin or not account.id or namespace == account.namespace:
            return
        if claimed in self._claimed:
            return
        limit = account.max_namespaces
        limit = self.defaults.max_namespaces if limit is None else limit
        # The database counts, since other processes claim namespaces of the same key.
        if not await asyncio.to_thread(self.claim, account.id, namespace, limit):
            raise ApiError(
                f"this key has reached its limit of namespaces below its own, {limit}",
                status=403,
                type="permission_error",
                code="too_many_namespaces",
                hint="use one of them, or ask the operator for a key with --max-namespaces",
            )
        # Claims are never taken back, so a success needs no second look at the database.
        self._claimed.add(claimed)


def may_use(account: Account, namespace: str) -> bool:
    """Return whether the key may use the namespace: its own, one below it, or any for an admin and
    for clients without keys."""
    own = account.namespace
    is_open = account is ANONYMOUS or account.admin
    return is_open or namespace == own or bool(own and namespace.startswith(f"{own}/"))


def namespace_of(account: Account, wanted: str | None) -> str:
    """Return the namespace of a request: that of its key, or the one that the client wants. Raises
    `ApiError`."""
    own = account.namespace
    if wanted is None:
        return own
    if may_use(account, wanted):
        return wanted
    raise ApiError(
        f"this key has no access to the namespace {wanted[:100]!r}",
        status=403,
        code="namespace_forbidden",
        hint=f"leave it out, or name one below {own!r}/" if own else "leave it out",
    )


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


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the key in the Authorization header or, as Anthropic's clients send it, in x-api-key;
    empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
