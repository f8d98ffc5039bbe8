"""Sessions of the console: login with a key of the gateway, and the permissions of its owner."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.requests import Request

from bottega.gateway.accounting.access import ANONYMOUS, may_use
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError

COOKIE = "bottega_console"
SESSION_SECONDS = 12 * 3600
LOCAL = "local"


@dataclass(frozen=True)
class ConsoleUser:
    """Owner of a session. Without `can_edit` the session is read-only; sessions of `--viewer` keys
    always are. `is_local` users have logged in with the link that the server printed."""

    account: Account
    can_edit: bool
    is_local: bool = False

    @property
    def name(self) -> str:
        return LOCAL if self.is_local else self.account.name

    @property
    def sees_all(self) -> bool:
        """Return whether the user sees all pages and namespaces."""
        return self.is_local or self.account.admin or self.account.viewer

    @property
    def can_store(self) -> bool:
        """Return whether the user may change the examples of its namespaces."""
        return self.can_edit and (self.sees_all or self.account.can_store)

    @property
    def can_administer(self) -> bool:
        """Return whether the user may change keys and all namespaces."""
        return self.can_edit and self.sees_all

    def namespace(self, wanted: str | None) -> str:
        """Return `wanted`, or the user's own namespace if it is None. Raises `ApiError`."""
        if wanted is None:
            return self.account.namespace
        if self.may_read(wanted):
            return wanted
        raise ApiError(
            f"this key has no access to the namespace {wanted[:100]!r}",
            status=403,
            hint="omit it to see your own namespace",
        )

    def may_read(self, namespace: str) -> bool:
        return self.sees_all or may_use(self.account, namespace)


class Sessions:
    """Sessions in signed cookies. Each cookie is signed with a secret derived from the key of the
    login: all gateways that share accounts accept it, and it becomes invalid with that key. A
    logout stores a time with the account, and ends all earlier sessions of the key. Without keys,
    users log in with `token`, which is valid until the process ends."""

    def __init__(self, accounts: Accounts | None, *, token: str | None = None) -> None:
        self._accounts = accounts
        self.token = token
        self._local_secret = secrets.token_bytes(32)
        self._local_after = 0.0

    def is_token(self, given: str) -> bool:
        token = self.token or ""
        return bool(token) and hmac.compare_digest(given.encode(errors="replace"), token.encode())

    def login(self, key: str, *, read_only: bool = False) -> str | None:
        """Return a cookie for a key or the token, None if it is not valid."""
        if self.is_token(key):
            return self._cookie(LOCAL, self._local_secret, read_only)
        found = None if self._accounts is None else self._accounts.sign_in(key)
        return None if found is None else self._cookie(found[0].id, found[1], read_only)

    def user(self, cookie: str | None) -> ConsoleUser | None:
        """Return the owner of a cookie, None if it is not valid or has expired."""
        id, _, signed = (cookie or "").partition(".")
        found = self._secrets(id)
        if found is None:
            return None
        account, valid, after = found
        try:
            read_only, begun = _serializer(*valid).loads(signed, max_age=SESSION_SECONDS)
        except BadSignature:
            return None
        if begun <= after:
            return None
        return ConsoleUser(account, not (read_only or account.viewer), is_local=id == LOCAL)

    def logout(self, user: ConsoleUser) -> None:
        """End all sessions of the user's key, or all that the link opened. Blocks. Raises
        `StoreError`."""
        if user.is_local:
            self._local_after = time.time()
        elif self._accounts is not None:
            self._accounts.end_sessions(user.account.id)

    def _secrets(self, id: str) -> tuple[Account, Sequence[bytes], float] | None:
        if id == LOCAL and self.token is not None:
            return ANONYMOUS, [self._local_secret], self._local_after
        return None if self._accounts is None else self._accounts.signing_keys(id)

    def _cookie(self, id: str, secret: bytes, read_only: bool) -> str:
        return f"{id}.{_serializer(secret).dumps([read_only, time.time()])}"


def _serializer(*valid: bytes) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(list(valid), salt="bottega console sessions")


def cookie_name(request: Request) -> str:
    """Return the name of the cookie. Browsers send cookies of a host to all of its ports, where
    other consoles may run."""
    port = request.url.port
    return COOKIE if port is None else f"{COOKIE}_{port}"


def new_token() -> str:
    return secrets.token_urlsafe(24)
