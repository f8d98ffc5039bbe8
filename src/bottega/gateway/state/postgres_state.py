"""State that gateways share through PostgreSQL: limits and repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bottega._util.postgres import PostgresPool
from bottega.gateway.state.limits import (
    GRACE_SECONDS,
    LEASE_SECONDS,
    LimitRequest,
    Renewal,
    Verdict,
    with_tolerance,
)
from bottega.gateway.state.repeats import FLIGHT_SECONDS, MAX_CHANGES, BeginResult, Changes
from bottega.gateway.state.response_cache import CachedReply

ALL = "*"
CHANGES_LOCK = 0x42746763  # "Btgc", so change numbers are in commit order
PRUNE = (
    "DELETE FROM gateway_changes WHERE key <> '*'"
    f" AND number <= (SELECT max(number) FROM gateway_changes) - {MAX_CHANGES}"
)
END = "DELETE FROM gateway_flights WHERE key = $1 AND id = $2"
LAND = f"""
WITH ended AS ({END})
INSERT INTO gateway_replies VALUES (
    $1, $3, $4, $5, $6, clock_timestamp(), clock_timestamp() + make_interval(secs => $7)
) ON CONFLICT (key) DO UPDATE SET epoch = excluded.epoch, payload = excluded.payload,
    route = excluded.route, model = excluded.model, stored = excluded.stored,
    expires = excluded.expires
"""
REPLACE = """
UPDATE gateway_replies SET payload = $2, route = $3, model = $4
WHERE key = $1 AND epoch = gateway_epoch() AND expires > clock_timestamp()
"""


class PostgresLimits:
    """Token buckets and reservations in unlogged tables, which skip the write-ahead log. Spending
    is read from the ledger in the same database."""

    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool

    async def decide(self, request: LimitRequest, /) -> Verdict:
        account, budget = request.account, request.account.usd_per_month
        rows = await self._pool.fetch(
            "SELECT * FROM gateway_decide($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            account.id,
            account.requests_per_minute,
            budget,
            None if budget is None else with_tolerance(budget),
            request.month,
            request.reservation,
            request.paid,
            request.usd,
            LEASE_SECONDS,
            GRACE_SECONDS,
        )
        return Verdict(*rows[0])

    async def settle(self, account: str, month: str, reservation: str, spent: float, /) -> None:
        await self._pool.execute(
            "DELETE FROM gateway_holds WHERE account = $1 AND id = $2", account, reservation
        )

    async def renew(self, reservations: Sequence[Renewal], /) -> None:
        accounts, ids, costs = zip(*sorted(reservations), strict=True)
        await self._pool.execute(
            "INSERT INTO gateway_holds SELECT one.*, extract(epoch FROM clock_timestamp()) + $4"
            " FROM unnest($1::text[], $2::text[], $3::double precision[]) AS one"
            " ON CONFLICT (account, id)"
            " DO UPDATE SET usd = excluded.usd, expires = excluded.expires",
            accounts,
            ids,
            costs,
            LEASE_SECONDS,
        )


class PostgresRepeats:
    """Replies and flights in unlogged tables, which a crash empties. Changes are in a logged table;
    the number of its last `ALL` is the epoch."""

    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool

    async def begin(self, key: str, flight: str, /) -> BeginResult:
        rows = await self._pool.fetch(
            "SELECT * FROM gateway_begin($1, $2, $3)", key, flight, FLIGHT_SECONDS
        )
        kind, epoch, payload, route, model, age = rows[0]
        reply = None if payload is None else CachedReply(payload, route, model)
        return BeginResult(kind, epoch, reply, age or 0.0)

    async def land(
        self, key: str, flight: str, epoch: int, reply: CachedReply | None, seconds: float, /
    ) -> None:
        # One statement, so a gateway that sees no flight sees the reply.
        if reply is None:
            await self._pool.execute(END, key, flight)
            return
        values = (epoch, reply.payload, reply.route, reply.model, seconds)
        await self._pool.execute(LAND, key, flight, *values)

    async def running(self, keys: Sequence[str], /) -> set[str]:
        rows = await self._pool.fetch(
            "SELECT key FROM gateway_flights WHERE key = ANY($1) AND expires > clock_timestamp()",
            list(keys),
        )
        return {row["key"] for row in rows}

    async def renew(self, flights: Mapping[str, str], /) -> None:
        await self._pool.execute(
            "UPDATE gateway_flights AS f"
            " SET expires = clock_timestamp() + make_interval(secs => $3)"
            " FROM unnest($1::text[], $2::text[]) AS own (key, id)"
            " WHERE f.key = own.key AND f.id = own.id",
            list(flights),
            list(flights.values()),
            FLIGHT_SECONDS,
        )
        await self._pool.execute("DELETE FROM gateway_replies WHERE expires <= clock_timestamp()")

    async def replace(self, key: str, reply: CachedReply, /) -> None:
        async with self._pool.transaction() as connection:
            await connection.execute(REPLACE, key, reply.payload, reply.route, reply.model)
            await connection.execute("SELECT pg_advisory_xact_lock($1)", CHANGES_LOCK)
            await connection.execute("INSERT INTO gateway_changes (key) VALUES ($1)", key)
            await connection.execute(PRUNE)

    async def invalidate_all(self) -> None:
        async with self._pool.transaction() as connection:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", CHANGES_LOCK)
            await connection.execute("INSERT INTO gateway_changes (key) VALUES ($1)", ALL)
            await connection.execute(PRUNE)

    async def changes(self, position: tuple[int, int] | None, /) -> Changes:
        last = 0 if position is None else position[1]
        rows = await self._pool.fetch(
            "SELECT number, key FROM gateway_changes WHERE number > $1 ORDER BY number DESC"
            f" LIMIT {1 if position is None else MAX_CHANGES}",
            last,
        )
        newest = rows[0]["number"] if rows else last
        keys = {row["key"] for row in rows}
        everything = position is None or ALL in keys or len(rows) == MAX_CHANGES
        return Changes((0, newest), None if everything else keys)
