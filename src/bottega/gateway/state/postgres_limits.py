"""Limits of keys in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from bottega._util.postgres import PostgresPool
from bottega.gateway.state.limits import (
    GRACE_SECONDS,
    LEASE_SECONDS,
    LimitRequest,
    Renewal,
    Verdict,
    with_tolerance,
)


class PostgresLimits:
    """Token buckets and reservations in unlogged tables, which skip the write-ahead log. Spending
    is that of the ledger in the same database."""

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
