"""The commands `bottega keys add`, `ls`, `rotate` and `revoke`."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bottega._util.progress import plural
from bottega.cli.help import HelpCommand, command_group
from bottega.cli.options import CONFIG, DataFolder, Json, SharedDatabase, gateway_store
from bottega.cli.output import note, print_json, print_result, print_table
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.limiter import ALL
from bottega.gateway.accounting.row_types import Account
from bottega.gateway.config.config_file import load_config
from bottega.naming import suggestion

COLUMNS = (
    *("id", "name", "namespace", "permissions", "per minute", "USD per month"),
    *("concurrent", "tiers", "namespaces", "created", "expires", "revoked"),
)
DAY = 86_400
keys = command_group("Create, list, rotate and revoke the gateway's keys.")


@keys.command(cls=HelpCommand)
def add(
    name: Annotated[
        str, Argument(metavar="NAME", help="Name of the key's owner, for display only.")
    ],
    data: DataFolder = None,
    database: SharedDatabase = None,
    namespace: Annotated[
        str, Option(metavar="NAME", help="Cache namespace that the key reads and fills.")
    ] = "",
    admin: Annotated[
        bool, Option("--admin", help="Allow /admin: keys and caches of all namespaces.")
    ] = False,
    no_store: Annotated[
        bool, Option("--no-store", help="Never store its answers in the cache; deny corrections.")
    ] = False,
    rpm: Annotated[
        int | None, Option(help="Maximum requests per minute (default: no limit).")
    ] = None,
    usd_per_month: Annotated[
        float | None,
        Option(metavar="USD", help="Budget per calendar month, UTC (default: no limit)."),
    ] = None,
    max_concurrent: Annotated[
        int | None, Option(help="Maximum concurrent requests (default: keys.max_concurrent).")
    ] = None,
    tiers: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Tiers that the key may request, comma-separated, or * for all"
            " (default: keys.tiers).",
        ),
    ] = None,
    max_namespaces: Annotated[
        int | None, Option(help="Maximum namespaces below its own (default: keys.max_namespaces).")
    ] = None,
    expires_days: Annotated[
        float | None, Option(metavar="DAYS", help="Days until the key expires (default: never).")
    ] = None,
    viewer: Annotated[
        bool,
        Option(
            "--viewer",
            help="See all namespaces in the console, and /metrics; change nothing, send nothing.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Create a key. It is shown once; only its hash is stored."""
    location = gateway_store(data, database)
    if isinstance(location, Path):
        location.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(Accounts(location)) as accounts:
        before, now = accounts.list(), time.time()
        same = sum(one.name == name and one.is_valid(now) for one in before)
        account, token = accounts.add(
            name,
            namespace=namespace,
            admin=admin,
            can_store=not no_store,
            requests_per_minute=rpm,
            usd_per_month=usd_per_month,
            max_concurrent=max_concurrent,
            tiers=None if tiers is None else list(filter(None, tiers.split(","))),
            max_namespaces=max_namespaces,
            expires=None if expires_days is None else time.time() + expires_days * DAY,
            viewer=viewer,
        )
    if CONFIG.exists():
        _warn_of_unknown_tiers(account)
    print_result(json, {"key": token, "account": account}, token)
    if not json:
        note(f"this is the key of {account.name!r} (id {account.id}); it is not shown again")
    if not before:
        note("restart a gateway that runs without keys: until then it accepts requests without one")
    if same:
        note(f"{plural(same, 'other valid key')} named {name!r}: see bottega keys ls")


@keys.command(cls=HelpCommand)
def ls(data: DataFolder = None, database: SharedDatabase = None, json: Json = False) -> None:
    """List the accounts of all keys with their permissions and limits, not the keys themselves."""
    with closing(Accounts(gateway_store(data, database), create=False)) as accounts:
        found = accounts.list()
    if json:
        print_json(found)
        return
    print_table(COLUMNS, [_row(account) for account in found])
    if not found:
        note("no keys yet; create one with bottega keys add NAME")


@keys.command(cls=HelpCommand)
def rotate(
    id: Annotated[str, Argument(metavar="ID", help="Id as shown by ls.")],
    data: DataFolder = None,
    database: SharedDatabase = None,
    keep_hours: Annotated[
        float,
        Option(metavar="HOURS", help="Hours for which the old key remains valid, at most 720."),
    ] = 0.0,
    json: Json = False,
) -> None:
    """Replace a key; keep its limits, budget and spending. The new key is shown once."""
    with closing(Accounts(gateway_store(data, database), create=False)) as accounts:
        account, token = accounts.rotate(id, keep_seconds=keep_hours * 3600)
    print_result(json, {"key": token, "account": account}, token)
    if not json:
        note(f"this is the new key of {account.name!r} (id {account.id}); it is not shown again")


@keys.command(cls=HelpCommand)
def revoke(
    id: Annotated[str, Argument(metavar="ID", help="Id as shown by ls, or a leaked key.")],
    data: DataFolder = None,
    database: SharedDatabase = None,
    json: Json = False,
) -> None:
    """Revoke a key. A running gateway rejects it within a second."""
    with closing(Accounts(gateway_store(data, database), create=False)) as accounts:
        account = accounts.revoke(id)
    print_result(json, account, f"the key of {account.name!r} (id {account.id}) is revoked")


def _warn_of_unknown_tiers(account: Account) -> None:
    tiers = [tier.name for tier in load_config(CONFIG).tiers]
    for name in account.tiers or ():
        if name not in (*tiers, ALL):
            similar = suggestion(name, tiers).rstrip()
            note(f"{CONFIG} has no tier {name!r}" + (f"; {similar}" if similar else ""))


def _row(account: Account) -> tuple[object, ...]:
    rights = ["administer"] * account.admin + ["store"] * account.can_store
    if account.viewer:
        rights = ["view"]
    return (
        account.id,
        account.name,
        account.namespace or "(unnamed)",
        ", ".join(rights) or "requests only",
        account.requests_per_minute,
        None if account.usd_per_month is None else f"{account.usd_per_month:g}",
        account.max_concurrent,
        None if account.tiers is None else ",".join(account.tiers) or "none",
        account.max_namespaces,
        _local_time(account.created),
        _local_time(account.expires),
        _local_time(account.revoked),
    )


def _local_time(moment: float | None) -> str | None:
    return None if moment is None else f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M}"
