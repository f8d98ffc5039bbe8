"""Accounts and their API keys, stored as hashes."""

from __future__ import annotations

import hmac
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from bottega._util.batch_writer import OutageLog
from bottega._util.sql_tables import SqlRow, SqlTables, placeholders
from bottega.errors import BottegaError, NotFoundError, SettingError
from bottega.gateway.accounting.ledger_database import open_tables
from bottega.gateway.accounting.ledger_schema import ACCOUNTS, GATEWAY_DB, Account
from bottega.knowledge.records import is_text

log = logging.getLogger(__name__)

POLL_SECONDS = 0.8
MAX_NAME_LENGTH = 200
MAX_TIME = 2**40
MAX_KEEP_SECONDS = 30 * 86_400.0  # a longer time would be a second key, not a rotation
# Clients such as VLMEvalKit take only keys that begin with sk-.
TOKEN = re.compile(r"sk-bottega-([0-9a-f]{12})-([0-9a-f]{64})", re.ASCII)
TIER = re.compile(r"\*|[a-z][a-z0-9_-]{0,31}")
NO_KEY = "0" * 12, "0" * 64
REQUIRED = ("name", "namespace", "admin", "can_store", "viewer")
DIGESTS = ["digest", "previous_digest", "previous_until"]
# Settings that `Accounts.update` changes.
CHANGEABLE = frozenset(ACCOUNTS.names) - {"id", "created", "revoked"}
READ = (
    f"SELECT {', '.join(DIGESTS)}, sessions_after, {ACCOUNTS.column_list} FROM gateway_accounts"
    " ORDER BY created, id"
)
REVOKE = "UPDATE gateway_accounts SET revoked = coalesce(revoked, ?2) WHERE id = ?1"
# Rows are only added, changed and revoked, so these four numbers identify their state.
STAMP = (
    "SELECT count(*), count(revoked), coalesce(sum(revoked), 0.0), sum(changes)"
    " FROM gateway_accounts"
)
# The database counts, since other processes claim namespaces of the same key.
CLAIM = (
    "INSERT INTO gateway_namespaces SELECT ?1, ?2"
    " WHERE (SELECT count(*) FROM gateway_namespaces WHERE account = ?1) < ?3"
    " ON CONFLICT DO NOTHING"
)
CLAIMED = "SELECT 1 FROM gateway_namespaces WHERE account = ?1 AND namespace = ?2"


@dataclass(frozen=True)
class StoredAccount:
    """Account with the SHA-256 of its key, and of the one before it until `previous_until`. Console
    sessions that began up to `sessions_after` have ended."""

    account: Account
    digest: bytes
    previous: bytes | None = None
    previous_until: float = 0.0
    sessions_after: float = 0.0


class Accounts:
    """Accounts in gateway.db, or in PostgreSQL if `location` is a URL. A key is 256 random bits;
    only its SHA-256 is stored, so it cannot be shown again. `authenticate`, `find`, `sign_in` and
    `signing_keys` read memory only: a thread refreshes it within a second of a change by any
    process, until `close`. All other methods block and raise `StoreError`."""

    def __init__(self, location: str | Path, *, create: bool = True) -> None:
        self._tables: SqlTables = open_tables(location, create=create)
        self._stamp: SqlRow = ()
        self._lock = threading.Lock()
        self._accounts: Mapping[str, StoredAccount] = {}
        self._outage = OutageLog(log)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._refresh_loop, name="bottega-accounts", daemon=True
        )
        try:
            self._refresh()
        except BaseException:
            self._tables.close()
            raise
        self._thread.start()

    def authenticate(self, token: str | None) -> Account | None:
        """Return the account of a key, None if the key is unknown, revoked or expired. Takes
        microseconds, in constant time for valid and invalid keys."""
        found = TOKEN.fullmatch(token or "")
        id, secret = found.groups() if found else NO_KEY  # hash and compare in any case
        stored, now = self._accounts.get(id, NO_ACCOUNT), time.time()
        digest = sha256(secret.encode()).digest()
        is_current = hmac.compare_digest(digest, stored.digest)
        was_current = hmac.compare_digest(digest, stored.previous or stored.digest)
        is_key = is_current or (was_current and now < stored.previous_until)
        return stored.account if is_key and stored.account.is_valid(now) else None

    def find(self, id: str) -> Account | None:
        """Return the account with this id, None if it is unknown, revoked or expired."""
        account = self._accounts.get(id, NO_ACCOUNT).account
        return account if account.is_valid(time.time()) else None

    def sign_in(self, token: str) -> tuple[Account, bytes] | None:
        """Return the account of a key and a secret derived from this key, None if the key is
        unknown, revoked or expired."""
        account, found = self.authenticate(token), TOKEN.fullmatch(token)
        if account is None or found is None:
            return None
        return account, _signing_key(sha256(found[2].encode()).digest())

    def signing_keys(self, id: str) -> tuple[Account, Sequence[bytes], float] | None:
        """Return the account with this id, the secrets derived from its valid keys, two after a
        rotation that keeps the old key, and the time of its last logout. None if the id is unknown
        or the key is revoked or expired."""
        account = self.find(id)
        if account is None:
            return None
        stored = self._accounts[id]
        valid = [stored.digest]
        if stored.previous is not None and time.time() < stored.previous_until:
            valid.append(stored.previous)
        return account, [_signing_key(digest) for digest in valid], stored.sessions_after

    def end_sessions(self, id: str) -> None:
        """End all sessions of a key, in all processes that share the accounts. Blocks. Raises
        `NotFoundError`."""
        self._stored(id)
        self._update(id, {"sessions_after": time.time()})

    def add(self, name: str, **settings: Any) -> tuple[Account, str]:
        """Add an account with these fields of `Account`. Return it and its key, which cannot be
        shown again. Raises `SettingError`."""
        if settings.get("tiers") is not None:
            settings["tiers"] = tuple(settings["tiers"])
        account = Account(secrets.token_hex(6), name, created=time.time())
        account = replace(account, **settings)
        _check(account)
        secret = secrets.token_hex(32)
        row = {**_row(vars(account)), "digest": sha256(secret.encode()).digest()}
        columns, marks = ", ".join(row), placeholders(len(row))
        insert = f"INSERT INTO gateway_accounts ({columns}) VALUES ({marks})"
        with self._lock:
            self._tables.write([(insert, tuple(row.values()))])
        self._refresh()
        return account, f"sk-bottega-{account.id}-{secret}"

    def list(self) -> list[Account]:
        """Return all accounts, oldest first, revoked ones included."""
        self._refresh()
        return [stored.account for stored in self._accounts.values()]

    def revoke(self, id: str) -> Account:
        """Revoke a key by its id, or by the key itself if it leaked. A second call changes
        nothing. Raises `NotFoundError`."""
        if found := TOKEN.fullmatch(id):
            id = found[1]
        with self._lock:
            self._tables.execute(REVOKE, id, time.time())
        return self._stored(id).account

    def update(self, id: str, **settings: Any) -> Account:
        """Change settings of an account and return it. Raises `SettingError` and
        `NotFoundError`."""
        if unknown := settings.keys() - CHANGEABLE:
            raise SettingError(f"{min(unknown)} cannot be changed", hint="create another key")
        account = replace(self._stored(id).account, **settings)
        _check(account)
        if not settings:
            return account
        self._update(id, _row({name: getattr(account, name) for name in settings}))
        return self._stored(id).account

    def rotate(self, id: str, *, keep_seconds: float = 0.0) -> tuple[Account, str]:
        """Replace the key of an account. Return the account and the new key, which cannot be shown
        again. The old key remains valid for `keep_seconds`. Raises `SettingError` and
        `NotFoundError`."""
        if not 0 <= keep_seconds <= MAX_KEEP_SECONDS:
            raise SettingError(
                f"keep_seconds must be from 0 to {MAX_KEEP_SECONDS:.0f}, got {keep_seconds:g}",
                hint="give at most 30 days, or add another key",
            )
        old = self._stored(id)
        if old.account.revoked is not None:
            raise SettingError("the key is revoked", hint="add another key")
        secret = secrets.token_hex(32)
        values = (sha256(secret.encode()).digest(), old.digest, time.time() + keep_seconds)
        self._update(id, dict(zip(DIGESTS, values, strict=True)))
        return old.account, f"sk-bottega-{id}-{secret}"

    def _update(self, id: str, row: Mapping[str, object]) -> None:
        changes = ", ".join(f"{name} = ?{number}" for number, name in enumerate(row, 2))
        statement = f"UPDATE gateway_accounts SET {changes}, changes = changes + 1 WHERE id = ?1"
        with self._lock:
            self._tables.execute(statement, id, *row.values())
        self._refresh()

    def _stored(self, id: str) -> StoredAccount:
        self._refresh()
        if id not in self._accounts:  # the message omits the argument: it may be a key
            raise NotFoundError("no key has this id", hint="run bottega keys ls for the ids")
        return self._accounts[id]

    def claim_namespace(self, id: str, namespace: str, limit: int) -> bool:
        """Record that the key uses this namespace. Return False if it has already used `limit`
        other namespaces, in any process that shares the accounts."""
        # Lock the account's row first: concurrent claims must see each other's insertions.
        lock = f"SELECT 1 FROM gateway_accounts WHERE id = ?1{self._tables.dialect.for_update}"
        claim = (CLAIM, (id, namespace, limit))
        with self._lock:
            return bool(self._tables.write([(lock, (id,)), claim, (CLAIMED, (id, namespace))]))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._tables.close()

    def _refresh_loop(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self._refresh()
            except BottegaError as error:
                self._outage.failed(
                    "cannot refresh the keys, those last read stay valid: %s", error
                )
            else:
                self._outage.ended("the keys are refreshed again")

    def _refresh(self) -> None:
        """Read the accounts if they have changed."""
        with self._lock:
            (stamp,) = self._tables.execute(STAMP)
            if stamp == self._stamp:
                return
            rows = self._tables.execute(READ)
            with GATEWAY_DB.reading(self._tables.name):
                found = [_stored_account(*row) for row in rows]
            # One assignment: `authenticate` reads the mapping without the lock.
            self._accounts = {stored.account.id: stored for stored in found}
            self._stamp = stamp  # only after a complete read: the next call repeats one that failed


def _signing_key(digest: bytes) -> bytes:
    return hmac.digest(digest, b"bottega signing key", "sha256")


def _row(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return settings as columns."""
    row = dict(settings)
    if row.get("tiers") is not None:
        row["tiers"] = ",".join(row["tiers"])
    return row


def _stored_account(
    digest: bytes,
    previous: bytes | None,
    previous_until: float | None,
    sessions_after: float | None,
    *row: Any,
) -> StoredAccount:
    values: dict[str, Any] = dict(zip(ACCOUNTS.names, row, strict=True))
    texts = (values[name] for name in ("id", "name", "namespace"))
    if not (isinstance(digest, bytes) and all(map(is_text, texts))):
        raise TypeError(f"account {values['id']!a} is damaged")
    for name in ("admin", "can_store", "viewer"):
        values[name] = bool(values[name])
    if values["tiers"] is not None:
        values["tiers"] = tuple(filter(None, values["tiers"].split(",")))
    account = Account(**values)
    return StoredAccount(account, digest, previous, previous_until or 0.0, sessions_after or 0.0)


# Its key is unknown, so invalid ids take as long as valid ones.
NO_ACCOUNT = StoredAccount(
    Account("", "anonymous", revoked=0.0), sha256(secrets.token_bytes(32)).digest()
)


def _check(account: Account) -> None:
    for name, flag in vars(account).items():
        if flag is None and name in REQUIRED:
            raise SettingError(f"{name} must not be null", hint="leave it out to keep it")
    for name, text, least in (("name", account.name, 1), ("namespace", account.namespace, 0)):
        printable = is_text(text) and text.isprintable() and len(text.strip()) >= least
        if not printable or len(text) > MAX_NAME_LENGTH:
            raise SettingError(
                f"{name} must be printable text, got {text[:MAX_NAME_LENGTH]!a}",
                hint=f"use {least} to {MAX_NAME_LENGTH} printable characters, such as 'team-a'",
            )
    for name, number, least in (
        ("requests_per_minute", account.requests_per_minute, 1),
        ("usd_per_month", account.usd_per_month, 0),
        ("max_concurrent", account.max_concurrent, 1),
        ("max_namespaces", account.max_namespaces, 0),
    ):
        limit = math.inf if name == "usd_per_month" else 2**31
        if number is not None and not least <= number < limit:
            raise SettingError(
                f"{name} must be at least {least}, got {number}",
                hint=f"give {least} or more, or leave it out",
            )
    if account.expires is not None and not 0 <= account.expires < MAX_TIME:
        raise SettingError(
            f"expires must be a time in unix seconds, got {account.expires}",
            hint="give a moment in the future, or leave it out",
        )
    if account.admin and account.viewer:
        raise SettingError(
            "a key cannot be both admin and viewer", hint="set only one of admin and viewer"
        )
    for tier in account.tiers or ():
        if not (isinstance(tier, str) and TIER.fullmatch(tier)):
            shown = tier[:MAX_NAME_LENGTH] if isinstance(tier, str) else type(tier).__name__
            raise SettingError(
                f"tiers must be tier names, got {shown!a}",
                hint="give names such as apprentice,master, or * for all",
            )
