"""Access limits of a key: concurrent requests, allowed tiers, namespaces below its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bottega.gateway.accounting.accounts import Account
from bottega.openai_api.errors import ApiError

ALL = "*"

# Records that a key (account id) uses a namespace, up to a maximum number of them. Returns False if
# the maximum is reached. Blocks.
Claim = Callable[[str, str, int], bool]


@dataclass(frozen=True)
class KeyDefaults:
    """Limits of keys that were created without their own."""

    max_concurrent: int = 128
    tiers: tuple[str, ...] = ()
    max_namespaces: int = 16


@dataclass
class Access:
    """Checker of the limits of keys. Use it from the event loop; it counts the requests of this
    process only."""

    claim: Claim
    defaults: KeyDefaults = field(default_factory=KeyDefaults)
    _under_way: Counter[str] = field(default_factory=Counter)
    _claimed: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, account: Account) -> None:
        """Count a request of the key; call `leave` when it ends. Raises `ApiError` (429)."""
        most = account.max_concurrent or self.defaults.max_concurrent
        if self._under_way[account.id] >= most:
            raise ApiError(
                f"this key has reached its limit of concurrent requests, {most}",
                status=429,
                type="rate_limit_error",
                code="too_many_concurrent_requests",
                headers={"retry-after": "1"},
                hint="wait until one ends, or ask the operator for a higher limit",
            )
        self._under_way[account.id] += 1

    def leave(self, account: Account) -> None:
        self._under_way[account.id] -= 1
        if self._under_way[account.id] <= 0:
            del self._under_way[account.id]

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
        if account.admin or namespace == account.namespace or claimed in self._claimed:
            return
        most = account.max_namespaces
        most = self.defaults.max_namespaces if most is None else most
        if not await asyncio.to_thread(self.claim, account.id, namespace, most):
            raise ApiError(
                f"this key has reached its limit of namespaces below its own, {most}",
                status=403,
                type="permission_error",
                code="too_many_namespaces",
                hint="use one of them, or ask the operator for a key with --max-namespaces",
            )
        self._claimed.add(claimed)
