"""Namespaces that a key may use: its own and those below it."""

from __future__ import annotations

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.ports import ANONYMOUS
from bottega.gateway.requests import Overrides
from bottega.openai_api.errors import ApiError


def may_use(account: Account, namespace: str) -> bool:
    """Return whether the key may use the namespace: its own, one below it, or any for an admin and
    for clients without keys."""
    own = account.namespace
    is_open = account is ANONYMOUS or account.admin
    return is_open or namespace == own or bool(own and namespace.startswith(f"{own}/"))


def namespace_of(account: Account, overrides: Overrides) -> str:
    """Return the namespace of a request: that of its key, or one that the client names. Raises
    `ApiError`."""
    own, wanted = account.namespace, overrides.namespace
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
