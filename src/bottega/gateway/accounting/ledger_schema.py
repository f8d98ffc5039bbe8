"""Rows and tables of the gateway: accounts, ledger, feedback, stored responses, shared state.

The fields of the dataclasses declare the columns. Both databases have these tables. PostgreSQL has
further ones, for the state that several gateways share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bottega._util.postgres import PostgresKind
from bottega._util.sql_tables import (
    POSTGRES,
    SQLITE,
    Count,
    Dollars,
    Number,
    OptionalDollars,
    OptionalNumber,
    OptionalText,
    Seconds,
    ShortText,
    SqlDialect,
    TableSchema,
    Text,
)
from bottega._util.sqlite import FileKind
from bottega.parsing import COMPARISON_RULES

FILE = "gateway.db"
DAY = 86_400
# Version of the judge's instruction, stored with each sample.
JUDGE_VERSION = 1
# A shadow is an extra call after an answer, made to measure the demonstrations. It has a cost but
# is not a client's request. A counted request asked for its number of tokens, not for an answer.
State = Literal["answered", "replayed", "passed_through", "failed", "shadow", "counted"]


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Entry:
    """Ledger entry of one request. `cost_usd` is None if the price is unknown; it includes
    `dismissed_usd`, the cost of tiers whose answers were escalated. `similarity` is the similarity
    of the nearest example found, shown or not, None without a retrieval or a candidate. `variant`
    is a variant of an experiment, such as "more-shots:b". `reason` states why this tier was
    selected, and why the request failed or passed through. `time` is in unix seconds. `id` is set
    by stores that several gateways share."""

    time: float
    request_id: Text
    account: Text
    namespace: Text
    tier: Text
    model: Text
    state: State
    shots: Count = 0
    similarity: OptionalNumber = None
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    cost_usd: OptionalDollars = None
    seconds: Seconds = 0.0
    status: Count = 200
    dismissed_usd: Dollars = 0.0
    id: str = ""
    variant: Text = ""
    reason: ShortText = ""


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """Shadow sample: the agreement of an answer with the master's, from 0 to 1, with and without
    demonstrations, None if the comparison's `rules`, a version, leave it undecided. The client's
    answer had demonstrations if `was_shown`. `retrieve` is the retrieval method, "none" if the
    question had no demonstrations. A `sampled` answer was served, and its question was drawn at
    random; the others were measured for the gate alone. `judge` is the version of the judge's
    instruction, 0 if no judge was asked. `id` is the id of an entry."""

    time: float
    request_id: Text
    namespace: Text
    similarity: Number
    with_score: OptionalNumber
    without_score: OptionalNumber
    id: str = ""
    retrieve: Text = ""
    sampled: bool = True
    was_shown: bool = True
    rules: Count = COMPARISON_RULES
    judge: Count = 0


@dataclass(frozen=True)
class Feedback:
    """Feedback of one account on one request. `rating` is from 0 to 1; `example` is the id of the
    demonstration that the correction became."""

    time: float
    request_id: Text
    account: Text
    namespace: Text
    tier: Text
    rating: float | None = None
    correction: OptionalText = None
    comment: OptionalText = None
    example: OptionalText = None


@dataclass(frozen=True)
class Account:
    """Account of one key. `requests_per_minute` and `usd_per_month` are None if unlimited. For
    `max_concurrent`, `tiers` (tiers that the key may choose, "*" for all) and `max_namespaces`
    (below its own), None means the gateway's default. Times are unix seconds; `revoked` is None
    until the key is revoked, `expires` if it never expires. A `viewer` sees everything in the
    console, changes nothing and sends no requests."""

    id: str
    name: str
    namespace: str = ""
    admin: bool = False
    can_store: bool = True
    requests_per_minute: int | None = None
    usd_per_month: float | None = None
    created: float = 0.0
    revoked: float | None = None
    max_concurrent: int | None = None
    tiers: tuple[str, ...] | None = None
    max_namespaces: int | None = None
    expires: float | None = None
    viewer: bool = False

    def is_valid(self, moment: float) -> bool:
        return self.revoked is None and (self.expires is None or moment < self.expires)


@dataclass(frozen=True)
class DailySums:
    """Sums over the entries of one day with the same namespace, tier, state and shots. A request
    that failed by the client's error is `rejected`; the rate limit of a tier is no such error.
    `day` counts days since 1970; `priced` counts requests with a known cost, `compared` those with
    a `similarity`. `net_usd` excludes the cost of dismissed tiers; `net_usd_squared` is the sum of
    its squares."""

    day: int
    namespace: str
    tier: str
    state: str
    shots: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    priced: int
    seconds: float
    similarity: float
    compared: int
    net_usd: float
    net_usd_squared: float


ENTRIES = TableSchema("gateway_entries", Entry)
SHADOWS = TableSchema("gateway_shadows", ShadowSample)
# Samples that another version of the rules or of the judge's instruction compared are not mixed.
RULES_VERSION = f"{COMPARISON_RULES}.{JUDGE_VERSION}"
CURRENT_RULES = f"rules = {COMPARISON_RULES} AND judge IN (0, {JUDGE_VERSION})"
FEEDBACK = TableSchema("gateway_feedback", Feedback)
ACCOUNTS = TableSchema("gateway_accounts", Account)
DAILY_SUMS = TableSchema("gateway_daily_sums", DailySums)
GROUP_COLUMNS, SUM_COLUMNS = DAILY_SUMS.names[:5], DAILY_SUMS.names[5:]
GROUP_LIST = ", ".join(GROUP_COLUMNS)


# Failures by the client's error. The 429 of a request that a tier was asked is the tier's.
REJECTED = (
    "{0}state = 'failed' AND {0}status BETWEEN 400 AND 498 AND ({0}status != 429 OR {0}tier = '')"
)


def group_values(dialect: SqlDialect, row: str = "") -> str:
    """Return the SQL expressions of `GROUP_COLUMNS` for one entry. `row` is the name of its row in
    a trigger, followed by a dot."""
    return (
        "{day}, {0}namespace, {0}tier,"
        f" CASE WHEN {REJECTED} THEN 'rejected' ELSE {{0}}state END,"
        " CASE WHEN {0}state = 'answered' THEN {0}shots ELSE 0 END"
    ).format(row, day=dialect.floor.format(f"{row}time / {DAY}"))


def daily_values(dialect: SqlDialect, row: str = "") -> str:
    """Return the SQL expressions of `DailySums` for one entry, as `group_values`."""
    net = f"({row}cost_usd - {row}dismissed_usd)"
    sums = (
        f"1, {row}prompt_tokens, {row}completion_tokens, {row}cached_tokens,"
        f" coalesce({row}cost_usd, 0.0), CASE WHEN {row}cost_usd IS NULL THEN 0 ELSE 1 END,"
        f" {row}seconds, coalesce({row}similarity, 0.0),"
        f" CASE WHEN {row}similarity IS NULL THEN 0 ELSE 1 END,"
        f" coalesce({net}, 0.0), coalesce({net} * {net}, 0.0)"
    )
    return f"{group_values(dialect, row)}, {sums}"


def sums_since(dialect: SqlDialect) -> str:
    """Return a subquery of the sums since a moment: whole days come from the daily sums, the
    partial first day from its entries. `since_values` returns the parameters 1 to 3."""
    return (
        f"(SELECT {DAILY_SUMS.column_list} FROM gateway_daily_sums WHERE day >= ?1 UNION ALL"
        f" SELECT {daily_values(dialect)} FROM gateway_entries WHERE time >= ?2 AND time < ?3)"
    )


def since_values(moment: float) -> tuple[int, float, float]:
    """Return the parameters of `sums_since`: the first whole day, the moment, and the start of that
    day."""
    day = int(-(-moment // DAY))
    return day, moment, float(day * DAY)


def _tables(dialect: SqlDialect) -> str:
    """Return the tables and indexes that both databases have."""
    text, real = dialect.types[str] + dialect.collation, dialect.types[float]
    blob, integer = dialect.types[bytes], dialect.types[int]
    secrets = (
        f"changes {integer} NOT NULL DEFAULT 0, digest {blob} NOT NULL, previous_digest {blob},"
        f" previous_until {real}, sessions_after {real}"
    )
    return f"""
{ACCOUNTS.create(dialect, key="id", more=secrets)}
CREATE TABLE gateway_namespaces (
    account {text} NOT NULL, namespace {text} NOT NULL, PRIMARY KEY (account, namespace)
){dialect.without_rowid};
{ENTRIES.create(dialect)}
CREATE INDEX gateway_entries_by_time ON gateway_entries (time);
CREATE INDEX gateway_entries_by_tier ON gateway_entries (tier, namespace, time)
    WHERE state IN ('answered', 'shadow');
CREATE INDEX gateway_entries_by_variant ON gateway_entries (variant, time) WHERE variant != '';
{DAILY_SUMS.create(dialect, key=GROUP_LIST)}
CREATE TABLE gateway_spending (
    month {text} NOT NULL, account {text} NOT NULL, usd {real} NOT NULL,
    PRIMARY KEY (month, account)
){dialect.without_rowid};
CREATE TABLE gateway_notes (name {text} PRIMARY KEY, value {text} NOT NULL){dialect.without_rowid};
{SHADOWS.create(dialect)}
CREATE INDEX gateway_shadows_by_time ON gateway_shadows (time);
{FEEDBACK.create(dialect, more="PRIMARY KEY (request_id, account)")}
CREATE INDEX gateway_feedback_by_time ON gateway_feedback (time);
CREATE TABLE gateway_responses (
    id {text} PRIMARY KEY,
    account {text} NOT NULL,
    time {real} NOT NULL,
    size {integer} NOT NULL,
    previous {text},
    input {text} NOT NULL,
    response {text} NOT NULL
);
CREATE INDEX gateway_responses_by_account ON gateway_responses (account, time);
CREATE INDEX gateway_responses_by_time ON gateway_responses (time);
"""


def _file_triggers() -> str:
    triggers = []
    for event, row, sign in (("INSERT", "NEW.", "+"), ("DELETE", "OLD.", "-")):
        changed = ", ".join(f"{name} = {name} {sign} excluded.{name}" for name in SUM_COLUMNS)
        last = ""
        if event == "DELETE":  # of the last request: subtraction leaves rounding errors in the sums
            last = (
                f"DELETE FROM gateway_daily_sums WHERE ({GROUP_LIST}) ="
                f" ({group_values(SQLITE, row)}) AND requests = 0;"
            )
        triggers.append(
            f"CREATE TRIGGER gateway_entries_{event.lower()} AFTER {event} ON gateway_entries BEGIN"
            f" INSERT INTO gateway_daily_sums VALUES ({daily_values(SQLITE, row)})"
            f" ON CONFLICT ({GROUP_LIST}) DO UPDATE SET {changed}; {last} END;"
        )
    return "\n".join(triggers)


def _change_sums(sign: str) -> str:
    """Return the statement that adds the rows of `changed` to the daily sums, or subtracts them. It
    sorts them, because two gateways that lock the same sums in different orders would deadlock."""
    sums = ", ".join(f"sum({name})" for name in SUM_COLUMNS)
    changed = ", ".join(f"{name} = kept.{name} {sign} excluded.{name}" for name in SUM_COLUMNS)
    return (
        f"INSERT INTO gateway_daily_sums AS kept SELECT {GROUP_LIST}, {sums}"
        f" FROM (SELECT {daily_values(POSTGRES)} FROM changed) AS each ({DAILY_SUMS.column_list})"
        f" GROUP BY {GROUP_LIST} ORDER BY {GROUP_LIST}"
        f" ON CONFLICT ({GROUP_LIST}) DO UPDATE SET {changed};"
    )


SHARED_LEDGER = f"""
ALTER TABLE gateway_entries ADD PRIMARY KEY (id);
ALTER TABLE gateway_shadows ADD PRIMARY KEY (id),
    ADD COLUMN transaction bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    ADD COLUMN number bigint GENERATED ALWAYS AS IDENTITY;
CREATE INDEX gateway_shadows_in_order ON gateway_shadows (namespace, retrieve, transaction, number);
CREATE TABLE gateway_cold_starts (namespace text PRIMARY KEY, used bigint NOT NULL);

CREATE FUNCTION gateway_add_entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_change_sums("+")}
    INSERT INTO gateway_spending AS kept
        SELECT to_char(to_timestamp(time) AT TIME ZONE 'UTC', 'YYYY-MM') AS month, account,
            sum(cost_usd)
        FROM changed WHERE cost_usd > 0 GROUP BY month, account ORDER BY month, account
        ON CONFLICT (month, account) DO UPDATE SET usd = kept.usd + excluded.usd;
    RETURN NULL;
END $$;
CREATE FUNCTION gateway_remove_entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_change_sums("-")}
    DELETE FROM gateway_daily_sums WHERE requests = 0;
    RETURN NULL;
END $$;
CREATE TRIGGER gateway_entries_added AFTER INSERT ON gateway_entries
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION gateway_add_entries();
CREATE TRIGGER gateway_entries_removed AFTER DELETE ON gateway_entries
    REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION gateway_remove_entries();
-- Write entries and return the resulting spending in one round trip. The trigger has added the
-- costs and locks these rows until the commit.
CREATE FUNCTION gateway_write(
    {", ".join(f"{POSTGRES.types[column.type]}[]" for column in ENTRIES.columns)},
    this_month text, budgets text[]
) RETURNS TABLE (month text, account text, usd double precision) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO gateway_entries ({ENTRIES.column_list})
        SELECT * FROM unnest({", ".join(f"${n}" for n in range(1, len(ENTRIES.columns) + 1))})
        ON CONFLICT (id) DO NOTHING;
    RETURN QUERY SELECT s.month, s.account, s.usd FROM gateway_spending AS s
        WHERE s.month >= this_month AND s.account = ANY(budgets);
END $$;
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

WAY_OUT = "set another --data folder or database, which begins without keys and ledger"
FILE_TABLES = _tables(SQLITE) + _file_triggers()
SHARED_TABLES = _tables(POSTGRES) + SHARED_LEDGER + LIMITS + REPEATS
GATEWAY_DB = FileKind("gateway database", (FILE_TABLES,), 0x42746777, way_out=WAY_OUT)  # "Btgw"
GATEWAY_TABLES = PostgresKind("gateway database", (SHARED_TABLES,), way_out=WAY_OUT)
