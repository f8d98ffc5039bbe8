"""Keys and budgets: create, change, rotate and revoke the gateway's keys."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError
from bottega.ui.pages import Page, PageResult, Redirect, Visit, require

NUMBERS = {
    "requests_per_minute": int,
    "usd_per_month": float,
    "max_concurrent": int,
    "max_namespaces": int,
}
MAX_KEEP_HOURS = 24 * 30
MAX_DAY = datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86_400


@dataclass(frozen=True)
class KeyPages:
    """Handlers of the keys. Admins change them; `--viewer` keys see them."""

    accounts: Accounts
    ledger: Ledger

    def browse(self, visit: Visit) -> PageResult:
        return self._page(visit)

    def add(self, visit: Visit) -> PageResult:
        settings = {
            "namespace": visit.value("namespace").strip(),
            "admin": visit.value("role") == "admin",
            "viewer": visit.value("role") == "viewer",
            "can_store": visit.value("can_store") == "yes",
            **_limits(visit),
        }
        account, token = self.accounts.add(visit.value("name").strip(), **settings)
        return self._page(visit, account, token)

    def change(self, visit: Visit) -> PageResult:
        settings = {"can_store": visit.value("can_store") == "yes", **_limits(visit)}
        old = self.accounts.find(visit.part("id"))
        # The form cannot show these settings exactly: an unchanged field keeps them.
        if old is not None and old.tiers == () and settings["tiers"] is None:
            settings["tiers"] = ()
        if old is not None and _day(old.expires) == visit.value("expires").strip():
            settings["expires"] = old.expires
        account = self.accounts.update(visit.part("id"), **settings)
        return Redirect("/keys", f"Changed the key of {account.name}")

    def rotate(self, visit: Visit) -> PageResult:
        hours = visit.number("keep_hours", 0, most=MAX_KEEP_HOURS)
        account, token = self.accounts.rotate(visit.part("id"), keep_seconds=hours * 3600.0)
        return self._page(visit, account, token)

    def revoke(self, visit: Visit) -> PageResult:
        account = self.accounts.revoke(visit.part("id"))
        return Redirect("/keys", f"Revoked the key of {account.name}")

    def _page(self, visit: Visit, created: Account | None = None, token: str = "") -> Page:
        """Return the page, with the key `token` if one was created: it is shown only here."""
        require(visit.user.sees_all, "see the keys")
        self.ledger.refresh_spending()  # other processes may have spent since the last write
        found = self.accounts.list()
        now = time.time()
        return Page(
            "keys.html",
            {
                "title": "Keys and budgets",
                "valid": [one for one in found if one.is_valid(now)],
                "ended": [one for one in found if not one.is_valid(now)],
                "spent": {one.id: self.ledger.spent_this_month(one.id) for one in found},
                "created": created,
                "token": token,
                "day": _day,
            },
        )


def _limits(visit: Visit) -> Mapping[str, Any]:
    """Return the limits of the form, None for empty fields. Raises `ApiError`."""
    found: dict[str, Any] = {}
    for name, kind in NUMBERS.items():
        text = visit.value(name).strip()
        try:
            found[name] = kind(text) if text else None
        except ValueError as error:
            raise ApiError(
                f"{name} must be a number, got {text[:40]!r}",
                hint="enter a number, or leave the field empty",
            ) from error
    tiers = visit.value("tiers").strip()
    found["tiers"] = tuple(filter(None, map(str.strip, tiers.split(",")))) if tiers else None
    found["expires"] = _end_of(visit.value("expires").strip())
    return found


def _end_of(day: str) -> float | None:
    """Return the end of a day (UTC) in unix seconds, None for "". Raises `ApiError`."""
    if not day:
        return None
    try:
        start = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise ApiError(
            f"expires must be a date, got {day[:40]!r}", hint="enter e.g. 2027-01-31"
        ) from error
    return start + 86_400


def _day(moment: float | None) -> str:
    """Return the day (UTC) of the last second before `moment`, "" if a form cannot show it."""
    if moment is None or moment > MAX_DAY:
        return ""
    return f"{datetime.fromtimestamp(moment - 1, UTC):%Y-%m-%d}"
