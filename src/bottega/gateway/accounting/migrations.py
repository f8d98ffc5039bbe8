"""Tables of the gateway in PostgreSQL and their migrations."""

from __future__ import annotations

from bottega._util.postgres import PostgresKind
from bottega.gateway.accounting.schema import COLUMNS, KEYS, SUMS, VALUES

FIRST_COLUMNS = {
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
VARIANT_COLUMNS = {**FIRST_COLUMNS, "variant": "text"}
ENTRY_COLUMNS = {**VARIANT_COLUMNS, "reason": "text"}
SHADOW_VALUES = {
    "time": "double precision",
    "request_id": "text",
    "namespace": "text",
    "similarity": "double precision",
    "with_score": "double precision",
    "without_score": "double precision",
}
FIRST_SHADOW_COLUMNS = {**SHADOW_VALUES, "id": "text"}
SHADOW_COLUMNS = {**SHADOW_VALUES, "retrieve": "text", "sampled": "boolean", "id": "text"}
# Sorted as in SQLite, so reports of both have the same figures.
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
    Sorted, because two gateways that lock the same sums in different orders would deadlock."""
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
CREATE TABLE gateway_entries ({_columns(FIRST_COLUMNS, NULLABLE)}, PRIMARY KEY (id));
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
    {_columns(FIRST_SHADOW_COLUMNS)}, PRIMARY KEY (id),
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

LIMITS = """
CREATE UNLOGGED TABLE gateway_limits (
    account text PRIMARY KEY,
    month text,
    tokens double precision NOT NULL,
    refilled double precision NOT NULL,
    ready double precision NOT NULL
);
CREATE UNLOGGED TABLE gateway_holds (
    account text, id text, usd double precision NOT NULL, expires double precision NOT NULL,
    PRIMARY KEY (account, id)
);
-- One call decides on a request. Each statement of a function sees all earlier commits, so data
-- read after locking the account's row are current. A single statement would read reservations
-- and spending as of its start, before it waited for the lock.
CREATE FUNCTION gateway_decide(
    key text, rpm bigint, budget double precision, tolerated double precision, this_month text,
    hold text, paid double precision, wanted double precision, lease double precision,
    grace double precision
) RETURNS TABLE (kind text, seconds double precision) LANGUAGE plpgsql AS $$
DECLARE
    is_new boolean;
    is_first boolean;
    moment double precision;
    bucket gateway_limits;
    spent double precision;
    others double precision;
BEGIN
    INSERT INTO gateway_limits VALUES (key, NULL, coalesce(rpm, 0), 0, 0) ON CONFLICT DO NOTHING;
    is_new := FOUND;
    SELECT * INTO bucket FROM gateway_limits AS l WHERE l.account = key FOR UPDATE;
    moment := extract(epoch FROM clock_timestamp());
    IF budget IS NOT NULL AND bucket.month IS DISTINCT FROM this_month THEN
        -- The ledger has a row once a gateway has checked this budget. If only the unlogged row is
        -- missing, a crash has emptied the table, and running requests must reserve again first.
        INSERT INTO gateway_spending VALUES (this_month, key, 0) ON CONFLICT DO NOTHING;
        is_first := FOUND;
        IF is_new AND NOT is_first THEN
            bucket.ready := moment + grace;
        END IF;
        UPDATE gateway_limits AS l SET month = this_month, ready = bucket.ready
            WHERE l.account = key;
    END IF;
    IF budget IS NOT NULL THEN
        IF bucket.ready > moment THEN
            RETURN QUERY SELECT 'grace', bucket.ready - moment;
            RETURN;
        END IF;
        DELETE FROM gateway_holds AS h WHERE h.account = key AND h.expires <= moment;
        SELECT coalesce((SELECT s.usd FROM gateway_spending AS s
                WHERE s.month = this_month AND s.account = key), 0) + paid,
            coalesce((SELECT sum(h.usd) FROM gateway_holds AS h
                WHERE h.account = key AND h.id <> hold), 0)
            INTO spent, others;
        IF spent >= budget THEN
            RETURN QUERY SELECT 'spent', 0::double precision;
            RETURN;
        END IF;
        IF wanted IS NOT NULL AND others > 0 AND spent + others + wanted > tolerated THEN
            RETURN QUERY SELECT 'reserved', 0::double precision;
            RETURN;
        END IF;
        IF wanted IS NOT NULL THEN
            INSERT INTO gateway_holds AS h VALUES (key, hold, paid + wanted, moment + lease)
                ON CONFLICT (account, id)
                DO UPDATE SET usd = excluded.usd, expires = excluded.expires;
        END IF;
    END IF;
    IF rpm IS NOT NULL AND wanted IS NULL THEN
        bucket.tokens := least(rpm, bucket.tokens + (moment - bucket.refilled) * rpm / 60);
        UPDATE gateway_limits AS l SET refilled = moment,
            tokens = bucket.tokens - CASE WHEN bucket.tokens < 1 THEN 0 ELSE 1 END
            WHERE l.account = key;
        IF bucket.tokens < 1 THEN
            RETURN QUERY SELECT 'wait', (1 - bucket.tokens) * 60 / rpm;
            RETURN;
        END IF;
    END IF;
    RETURN QUERY SELECT 'ok', 0::double precision;
END $$;
"""

REPEATS = """
CREATE TABLE gateway_changes (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL
);
CREATE INDEX gateway_changes_by_key ON gateway_changes (key, number);
CREATE UNLOGGED TABLE gateway_replies (
    key text PRIMARY KEY,
    epoch bigint NOT NULL,
    payload bytea NOT NULL,
    route text NOT NULL,
    model text NOT NULL,
    stored timestamptz NOT NULL,
    expires timestamptz NOT NULL
);
CREATE INDEX gateway_replies_by_end ON gateway_replies (expires);
CREATE UNLOGGED TABLE gateway_flights (
    key text PRIMARY KEY, id text NOT NULL, expires timestamptz NOT NULL
);
CREATE FUNCTION gateway_epoch() RETURNS bigint LANGUAGE sql AS $$
    SELECT coalesce(max(number), 0) FROM gateway_changes WHERE key = '*'
$$;
CREATE FUNCTION gateway_begin(wanted text, flight text, lease double precision)
RETURNS TABLE (
    kind text, epoch bigint, payload bytea, route text, model text, age double precision
) LANGUAGE plpgsql AS $$
DECLARE
    current bigint := gateway_epoch();
    leads boolean := false;
BEGIN
    LOOP
        RETURN QUERY SELECT 'reply', current, r.payload, r.route, r.model,
                extract(epoch FROM clock_timestamp() - r.stored)::double precision
            FROM gateway_replies AS r
            WHERE r.key = wanted AND r.epoch = current AND r.expires > clock_timestamp();
        IF FOUND AND leads THEN
            DELETE FROM gateway_flights AS f WHERE f.key = wanted AND f.id = flight;
        END IF;
        IF FOUND THEN
            RETURN;
        END IF;
        EXIT WHEN leads;
        INSERT INTO gateway_flights AS f
            VALUES (wanted, flight, clock_timestamp() + make_interval(secs => lease))
            ON CONFLICT (key) DO UPDATE SET id = excluded.id, expires = excluded.expires
                WHERE f.expires <= clock_timestamp() OR f.id = excluded.id;
        IF NOT FOUND THEN
            RETURN QUERY SELECT 'wait', current, NULL::bytea, NULL, NULL, NULL::double precision;
            RETURN;
        END IF;
        leads := true;  -- read again: the previous flight may have stored its reply meanwhile
    END LOOP;
    RETURN QUERY SELECT 'lead', current, NULL::bytea, NULL, NULL, NULL::double precision;
END $$;
"""


def _write(columns: dict[str, str]) -> str:
    """Return the function that writes entries and returns the resulting spending in one round trip.
    The trigger has added the costs and locks these rows until the commit."""
    arrays = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
    return f"""
CREATE FUNCTION gateway_write({", ".join(f"{kind}[]" for kind in columns.values())},
    this_month text, budgets text[])
RETURNS TABLE (month text, account text, usd double precision) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO gateway_entries ({", ".join(columns)})
        SELECT * FROM unnest({arrays})
        ON CONFLICT (id) DO NOTHING;
    RETURN QUERY SELECT s.month, s.account, s.usd FROM gateway_spending AS s
        WHERE s.month >= this_month AND s.account = ANY(budgets);
END $$;
"""


FEEDBACK = """
CREATE INDEX gateway_entries_by_request ON gateway_entries (request_id);
CREATE TABLE gateway_feedback (
    id bigint GENERATED ALWAYS AS IDENTITY,
    time double precision NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    account text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    tier text COLLATE "C" NOT NULL,
    rating double precision,
    correction text,
    comment text,
    example text,
    PRIMARY KEY (request_id, account),
    UNIQUE (id)
);
CREATE INDEX gateway_feedback_by_time ON gateway_feedback (time);
"""

RESPONSES = """
CREATE TABLE gateway_responses (
    id text COLLATE "C" PRIMARY KEY,
    account text COLLATE "C" NOT NULL,
    time double precision NOT NULL,
    size bigint NOT NULL,
    previous text COLLATE "C",
    input text NOT NULL,
    response text NOT NULL
);
CREATE INDEX gateway_responses_by_account ON gateway_responses (account, time);
CREATE INDEX gateway_responses_by_time ON gateway_responses (time);
"""

ACCOUNTS = """
ALTER TABLE gateway_accounts
    ADD COLUMN expires double precision,
    ADD COLUMN viewer boolean NOT NULL DEFAULT false,
    ADD COLUMN changes bigint NOT NULL DEFAULT 0,
    ADD COLUMN previous_secret bytea,
    ADD COLUMN previous_until double precision;
"""

# Gateways of the version before still call the other function during an upgrade.
VARIANTS = f"""
ALTER TABLE gateway_entries ADD COLUMN variant text COLLATE "C" NOT NULL DEFAULT '';
CREATE INDEX gateway_entries_by_variant ON gateway_entries (variant, time) WHERE variant != '';
{_write(VARIANT_COLUMNS)}
"""

WITHOUT_IDS = "DROP INDEX gateway_entries_by_request"

REASONS = f"""
ALTER TABLE gateway_entries ADD COLUMN reason text NOT NULL DEFAULT '';
{_write(ENTRY_COLUMNS)}
"""

SHADOW_RETRIEVAL = """
ALTER TABLE gateway_shadows ADD COLUMN retrieve text COLLATE "C" NOT NULL DEFAULT '';
DROP INDEX gateway_shadows_in_order;
CREATE INDEX gateway_shadows_in_order ON gateway_shadows (namespace, retrieve, transaction, number);
"""

SAMPLED_SHADOWS = "ALTER TABLE gateway_shadows ADD COLUMN sampled boolean NOT NULL DEFAULT true"

GATEWAY_TABLES = PostgresKind(
    "gateway",
    migrations=(
        *(FIRST, LIMITS, REPEATS, _write(FIRST_COLUMNS)),
        *(FEEDBACK, RESPONSES, ACCOUNTS, VARIANTS, WITHOUT_IDS, REASONS, SHADOW_RETRIEVAL),
        SAMPLED_SHADOWS,
    ),
)
