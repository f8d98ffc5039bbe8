"""Access to the gateway: hosts and origins of requests, and the limits of keys: tiers, namespaces,
concurrency, request rate and monthly cost."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError
from bottega.openai_api.transport import is_loopback, parse_address

# Tolerates rounding of float sums: 0.1 + 0.2 must fit into a budget of 0.3.
ROUNDING = 1 + 1e-9

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


class Spending(Protocol):
    """Spending of each account in US dollars in this calendar month, UTC. Read at every request,
    so it must not block."""

    def spent_this_month(self, account: str, /) -> float: ...


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    at: float


class AccountBudgetError(ApiError):
    """The key's monthly budget does not allow another upstream call."""


class LimitsUnavailableError(AccountBudgetError):
    """A server that the limits of the key need does not answer."""


class Limiter(Protocol):
    """Token bucket and monthly budget of each account. A bucket holds a minute's requests: a rested
    account may send them all at once. Use it from one event loop.

    Every upstream call first reserves its expected cost. It is rejected unless the amount spent,
    the reservations of other requests and its own fit into the budget. A request is always admitted
    if no other request has a reservation and some budget is left. As long as no call costs more
    than its reservation, spending exceeds the budget by less than the cost of one request.
    """

    async def admit(self, account: Account) -> float | None:
        """Return None for an admitted request, else the seconds to wait. Raises
        `AccountBudgetError`."""
        ...

    async def reserve(self, reservation: Reservation, usd: float) -> None: ...

    def release(self, reservation: Reservation) -> None: ...

    def reservation(self, account: Account) -> Reservation:
        return Reservation(self, account)


class LocalLimiter(Limiter):
    """Limiter of one process, which keeps buckets and reservations in memory."""

    def __init__(self, spending: Spending, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spending = spending
        self._clock = clock
        self._buckets: dict[str, _TokenBucket] = {}
        self._reservations: defaultdict[str, set[Reservation]] = defaultdict(set)

    async def admit(self, account: Account) -> float | None:
        # First: a request whose budget is spent takes no token from the bucket.
        if account.usd_per_month is not None:
            self._check_spent(account, 0.0)
        if (limit := account.requests_per_minute) is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(account.id, _TokenBucket(limit, now))
        bucket.tokens = min(limit, bucket.tokens + (now - bucket.at) * limit / 60)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * 60 / limit
        bucket.tokens -= 1
        return None

    async def reserve(self, reservation: Reservation, usd: float) -> None:
        account, budget = reservation.account, reservation.account.usd_per_month
        if budget is None:
            return
        # Paid calls of requests in progress have no ledger entry yet: add those of this request
        # here, and those of others below through `usd`.
        spent = self._check_spent(account, reservation.paid)
        others = sum(one.usd for one in self._reservations[account.id] if one is not reservation)
        # Without other reservations any call is admitted: else a large one would never fit.
        if others > 0 and spent + others + usd > budget * ROUNDING:
            raise budget_reserved(account)
        reservation.reserved = usd
        self._reservations[account.id].add(reservation)

    def release(self, reservation: Reservation) -> None:
        self._reservations[reservation.account.id].discard(reservation)
        if not self._reservations[reservation.account.id]:
            del self._reservations[reservation.account.id]

    def _check_spent(self, account: Account, paid: float) -> float:
        spent = self._spending.spent_this_month(account.id) + paid
        if account.usd_per_month is not None and spent >= account.usd_per_month:
            raise budget_spent(account)
        return spent


def budget_reserved(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        "this key's other requests have reserved the rest of its budget of"
        f" {account.usd_per_month:g} USD",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": "1", "retry-after-ms": "1000"},
        hint="wait until they end, or send a lower max_tokens to reserve less",
    )


def budget_spent(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        f"this key's budget of {account.usd_per_month:g} USD for this month is spent",
        status=429,
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
        hint="wait for the next month (UTC), or ask the operator for a higher budget",
    )


class Reservation:
    """Reservation of one request in its account's budget: `reserved` for the upstream call in
    progress and `paid` for earlier ones, in US dollars. Call `release` once the ledger entry of the
    request exists, which then counts instead."""

    def __init__(self, limiter: Limiter, account: Account) -> None:
        self.account = account
        self.reserved = 0.0
        self.paid = 0.0
        self._limiter = limiter

    @property
    def has_budget(self) -> bool:
        return self.account.usd_per_month is not None

    @property
    def usd(self) -> float:
        return self.reserved + self.paid

    async def reserve(self, usd: float) -> None:
        """Reserve the expected cost of the next upstream call. Raises `AccountBudgetError` if it
        does not fit."""
        await self._limiter.reserve(self, usd)

    def settle(self, usd: float) -> None:
        """Replace the reserved amount with the cost of the call in US dollars, 0 if it failed."""
        self.reserved, self.paid = 0.0, self.paid + usd

    def pay(self, usd: float) -> None:
        """Count the cost of one of several calls that were reserved together."""
        self.reserved, self.paid = max(0.0, self.reserved - usd), self.paid + usd

    def release(self) -> None:
        """End the reservation."""
        self._limiter.release(self)

    def sibling(self) -> Reservation:
        """Return a reservation for another request of the same account, such as a shadow sample."""
        return Reservation(self._limiter, self.account)
