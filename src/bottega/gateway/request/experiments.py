"""Experiments: requests split between two variants."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.config.overrides import Overrides
from bottega.openai_api.request import ChatRequest

Unit = Literal["question", "user", "account", "namespace"]
NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Experiment:
    """Split of requests between the variants a and b, each with its options. All requests of one
    `unit` get the same variant; `share` is the fraction of units that get b. `settings` identify
    the settings of a and b that are not options."""

    name: str
    unit: Unit
    share: float
    a: Overrides
    b: Overrides
    settings: tuple[str, str] = ("", "")

    def assign(
        self, overrides: Overrides, account: Account, namespace: str, request: ChatRequest
    ) -> tuple[str, Overrides]:
        """Return the variant's name and the options of the request. A request that sets
        an option of variants itself belongs to no variant."""
        if replace(overrides, namespace=None, store=True, replay=True) != NO_OVERRIDES:
            return "", overrides
        digest = hashlib.sha256(f"{self.name}\0{self.unit}\0".encode())
        for part in self._unit_of(account, namespace, request):
            digest.update(b"%d:" % len(part) + part)
        is_b = int.from_bytes(digest.digest()[:8], "big") < self.share * 2**64
        chosen = self.b if is_b else self.a
        kept = {name: getattr(overrides, name) for name in ("namespace", "store", "replay")}
        return f"{self.name}:{'b' if is_b else 'a'}", replace(chosen, **kept)

    def body_scope(self, account: Account) -> tuple[str, ...]:
        """Return the key parts, besides body and namespace, on which the variant depends."""
        by_account = self.unit in ("account", "user")
        return f"share={self.share}", *([f"account={account.id}"] if by_account else ())

    def reply_scope(self, variant: str) -> tuple[str, ...]:
        """Return the key parts that separate the replies of this variant from others."""
        return (variant, self.settings[variant.endswith(":b")]) if variant else ()

    def _unit_of(self, account: Account, namespace: str, request: ChatRequest) -> list[bytes]:
        match self.unit:
            case "namespace":
                parts = [namespace]
            case "account":
                parts = [account.id]
            case "user":  # names of users are the client's own
                parts = [account.id, str(request.body.get("user") or "")]
            case "question":
                parts = [request.question, *(image.url for image in request.images)]
        return [part.encode(errors="replace") for part in parts]
