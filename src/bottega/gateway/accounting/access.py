"""What a key may do: requests at once, tiers that it may choose, namespaces below its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.refusals import Refusal

ALL = "*"

# Notes that a key uses a namespace: False if it may use no more. Blocks.
Claim = Callable[[str, str, int], bool]


@dataclass(frozen=True)
class Defaults:
    """For keys that were made without limits of their own."""

    max_concurrent: int = 128
    tiers: tuple[str, ...] = ()
    max_namespaces: int = 16


@dataclass
class Access:
    """To be used from the event loop; requests under way are this process's own."""

    claim: Claim
    defaults: Defaults = field(default_factory=Defaults)
    _under_way: Counter[str] = field(default_factory=Counter)
    _claimed: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, account: Account) -> None:
        """Call `leave` when the request is over. Raises `Refusal` (429)."""
        most = account.max_concurrent or self.defaults.max_concurrent
        if self._under_way[account.id] >= most:
            raise Refusal(
                f"this key has {most} requests under way, which is its limit",
                status=429,
                type="rate_limit_error",
                code="too_many_concurrent_requests",
                headers={"retry-after": "1"},
                hint="wait for one of them, or ask the operator for more",
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

    def check_tiers(self, account: Account, tiers: Collection[str]) -> None:
        """Raises `Refusal` (403) for tiers that the key may not choose."""
        for tier in tiers:
            if not self.may_choose(account, tier):
                raise Refusal(
                    f"this key may not choose the tier {tier!r}",
                    status=403,
                    type="permission_error",
                    code="tier_forbidden",
                    hint="use the model bottega, or ask the operator: bottega keys add --tiers",
                )

    async def check_namespace(self, account: Account, namespace: str) -> None:
        """Raises `Refusal` (403) for one namespace too many."""
        known = (account.id, namespace)
        if account.admin or namespace == account.namespace or known in self._claimed:
            return
        most = account.max_namespaces
        most = self.defaults.max_namespaces if most is None else most
        if not await asyncio.to_thread(self.claim, account.id, namespace, most):
            raise Refusal(
                f"this key may use {most} namespaces below its own, and has used as many",
                status=403,
                type="permission_error",
                code="too_many_namespaces",
                hint="use one of them, or ask the operator: bottega keys add --max-namespaces",
            )
        self._claimed.add(known)
