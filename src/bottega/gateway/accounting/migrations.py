"""Tables of the gateway in PostgreSQL and their migrations."""

from __future__ import annotations

from bottega._util.postgres import PostgresKind
from bottega.gateway.accounting.database import COLUMNS, KEYS, SUMS, VALUES

ENTRY_COLUMNS = {
    "time": "double precision",
    "request_id": "text",
    "account": "text",
    "namespace": "text",
    "tier": "text",
    "model": "text",
    "state": "text",
    "shots": "bigint",
    "similarity": "double precision",
    "prompt_tokens": "bigint",
    "completion_tokens": "bigint",
    "cached_tokens": "bigint",
    "cost_usd": "double precision",
    "dismissed_usd": "double precision",
    "seconds": "double precision",
    "status": "bigint",
    "id": "text",
}
SHADOW_COLUMNS = {
    "time": "double precision",
    "request_id": "text",
    "namespace": "text",
    "similarity": "double precision",
    "with_score": "double precision",
    "without_score": "double precision",
    "id": "text",
}
# Sorted as SQLite sorts, so that both report the same figures.
TYPES = {"text": 'text COLLATE "C"'}
NULLABLE = ("similarity", "cost_usd")
SUM_TYPES = {
    **dict.fromkeys(SUMS, "double precision"),
    **dict.fromkeys(
        ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "priced", "compared"),
        "bigint",
    ),
}


def _columns(columns: dict[str, str], nullable: tuple[str, ...] = ()) -> str:
    return ", ".join(
        f"{name} {TYPES.get(kind, kind)}{'' if name in nullable else ' NOT NULL'}"
        for name, kind in columns.items()
    )


def _rollup(sign: str) -> str:
    """Return the statement that adds the rows of `changed` to the daily sums, or subtracts them.
    Sorted, since two gateways that lock the same sums in another order would block each other."""
    values = VALUES.format("").replace("CAST(time / 86400 AS INTEGER)", "floor(time / 86400)")
    sums = ", ".join(f"sum({name})" for name in SUMS)
    changed = ", ".join(f"{name} = kept.{name} {sign} excluded.{name}" for name in SUMS)
    keys = ", ".join(KEYS)
    return (
        f"INSERT INTO gateway_rollups AS kept ({COLUMNS}) SELECT {keys}, {sums}"
        f" FROM (SELECT {values} FROM changed) AS each ({COLUMNS}) GROUP BY {keys} ORDER BY {keys}"
        f" ON CONFLICT ({keys}) DO UPDATE SET {changed};"
    )


FIRST = f"""
CREATE TABLE gateway_accounts (
    id text PRIMARY KEY,
    name text NOT NULL,
    namespace text NOT NULL,
    admin boolean NOT NULL,
    can_store boolean NOT NULL,
    requests_per_minute bigint,
    usd_per_month double precision,
    created double precision NOT NULL,
    revoked double precision,
    max_concurrent bigint,
    tiers text,
    max_namespaces bigint,
    secret bytea NOT NULL
);
CREATE TABLE gateway_namespaces (
    account text, namespace text, PRIMARY KEY (account, namespace)
);
CREATE TABLE gateway_entries ({_columns(ENTRY_COLUMNS, NULLABLE)}, PRIMARY KEY (id));
CREATE INDEX gateway_entries_by_time ON gateway_entries (time);
CREATE INDEX gateway_entries_by_tier ON gateway_entries (tier, namespace, time)
    WHERE state IN ('answered', 'shadow');
CREATE TABLE gateway_rollups (
    day bigint, namespace text COLLATE "C", tier text COLLATE "C", state text, shots bigint,
    {_columns(SUM_TYPES)},
    PRIMARY KEY ({", ".join(KEYS)})
);
CREATE TABLE gateway_spending (
    month text, account text, usd double precision NOT NULL, PRIMARY KEY (month, account)
);
CREATE TABLE gateway_notes (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE gateway_shadows (
    {_columns(SHADOW_COLUMNS)}, PRIMARY KEY (id),
    transaction bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    number bigint GENERATED ALWAYS AS IDENTITY
);
CREATE INDEX gateway_shadows_by_time ON gateway_shadows (time);
CREATE INDEX gateway_shadows_in_order ON gateway_shadows (namespace, transaction, number);
CREATE TABLE gateway_cold_starts (namespace text PRIMARY KEY, used bigint NOT NULL);

CREATE FUNCTION gateway_add_entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_rollup("+")}
    INSERT INTO gateway_spending AS kept
        SELECT to_char(to_timestamp(time) AT TIME ZONE 'UTC', 'YYYY-MM') AS month, account,
            sum(cost_usd)
        FROM changed WHERE cost_usd > 0 GROUP BY month, account ORDER BY month, account
        ON CONFLICT (month, account) DO UPDATE SET usd = kept.usd + excluded.usd;
    RETURN NULL;
END $$;
CREATE FUNCTION gateway_remove_entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_rollup("-")}
    DELETE FROM gateway_rollups WHERE requests = 0;
    RETURN NULL;
END $$;
CREATE TRIGGER gateway_entries_added AFTER INSERT ON gateway_entries
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION gateway_add_entries();
CREATE TRIGGER gateway_entries_removed AFTER DELETE ON gateway_entries
    REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION gateway_remove_entries();
"""

GATEWAY_TABLES = PostgresKind("gateway", migrations=(FIRST,))
