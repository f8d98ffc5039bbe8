"""Limits of keys in Redis or Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bottega._util.postgres import PostgresPool
from bottega._util.valkey import ValkeyPipe
from bottega.gateway.state.limits import (
    GRACE_SECONDS,
    LEASE_SECONDS,
    LimitRequest,
    Renewal,
    Verdict,
    with_tolerance,
)

KEPT_DAYS = 40  # longer than a month; then the Redis key of an idle account expires
MAX_SEEDS = 4

# An account is one hash: bucket, spending and reservations are evicted together or not at all.
# Fields: tokens and refilled (ms), month, spent and ready (ms), known, and h:ID = "usd expires".
DECIDE = """
local rpm, budget, tolerated = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local month, reservation, paid = ARGV[4], ARGV[5], tonumber(ARGV[6])
local wanted, lease, kept = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields, state, others, lapsed = redis.call('HGETALL', KEYS[1]), {}, 0, false
for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if string.sub(name, 1, 2) == 'h:' then
        local usd, expires = string.match(value, '^(%S+) (%S+)$')
        if tonumber(expires) <= now then
            lapsed = true
            redis.call('HDEL', KEYS[1], name)
        elseif name ~= 'h:' .. reservation then
            others = others + tonumber(usd)
        end
    else
        state[name] = value
    end
end
if budget >= 0 then
    -- An expired reservation was not settled, but its cost may be committed: read the ledger again.
    if lapsed or state.month ~= month then
        redis.call('HDEL', KEYS[1], 'month', 'spent')
        return {'unseeded', '0'}
    end
    local left = tonumber(state.ready or '0') - now
    if left > 0 then return {'grace', tostring(left / 1000)} end
    local spent = tonumber(state.spent) + paid
    if spent >= budget then return {'spent', '0'} end
    if wanted >= 0 then
        if others > 0 and spent + others + wanted > tolerated then return {'reserved', '0'} end
        local value = string.format('%.17g %.0f', paid + wanted, now + lease)
        redis.call('HSET', KEYS[1], 'h:' .. reservation, value)
    end
end
local wait = 0
if rpm > 0 and wanted < 0 then
    local tokens, refilled = tonumber(state.tokens or rpm), tonumber(state.refilled or now)
    tokens = math.min(rpm, tokens + (now - refilled) * rpm / 60000)
    if tokens < 1 then wait = (1 - tokens) * 60 / rpm else tokens = tokens - 1 end
    local text = string.format('%.17g', tokens)
    redis.call('HSET', KEYS[1], 'tokens', text, 'refilled', string.format('%.0f', now))
end
redis.call('PEXPIRE', KEYS[1], kept)
if wait > 0 then return {'wait', tostring(wait)} end
return {'ok', '0'}
"""
# Spending only grows, so if several gateways seed or settle, the largest value is right. If the
# hash of an account was lost, decisions wait for a grace period, in which gateways renew its
# reservations.
SEED = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local month, spent, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('HGET', KEYS[1], 'month') == month then
    spent = math.max(spent, tonumber(redis.call('HGET', KEYS[1], 'spent')))
elseif redis.call('HEXISTS', KEYS[1], 'known') == 0 then
    redis.call('HSET', KEYS[1], 'ready', string.format('%.0f', now + grace))
end
local text = string.format('%.17g', spent)
redis.call('HSET', KEYS[1], 'month', month, 'spent', text, 'known', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""
SETTLE = """
redis.call('HDEL', KEYS[1], 'h:' .. ARGV[2])
if redis.call('HGET', KEYS[1], 'month') == ARGV[1] then
    local spent = math.max(tonumber(ARGV[3]), tonumber(redis.call('HGET', KEYS[1], 'spent')))
    redis.call('HSET', KEYS[1], 'spent', string.format('%.17g', spent))
end
"""
RENEW = """
local time = redis.call('TIME')
local expires = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
    redis.call('HSET', KEYS[1], 'h:' .. ARGV[i], ARGV[i + 1] .. string.format(' %.0f', expires))
end
redis.call('PEXPIRE', KEYS[1], 86400000)
"""


class CommittedSpending(NamedTuple):
    """Committed spending of an account in US dollars. `is_first` is true only for the first reader
    of the month: then no request of the account can be running."""

    usd: float
    is_first: bool


ReadSpending = Callable[[str, str], Awaitable[CommittedSpending]]


def spending_reader(pool: PostgresPool) -> ReadSpending:
    """Return a function that reads the spending of an account in a month from the ledger."""

    async def read(account: str, month: str) -> CommittedSpending:
        async with pool.transaction() as connection:
            first = await connection.fetchval(
                "INSERT INTO gateway_spending VALUES ($1, $2, 0) ON CONFLICT DO NOTHING"
                " RETURNING true",
                month,
                account,
            )
            usd = await connection.fetchval(
                "SELECT usd FROM gateway_spending WHERE month = $1 AND account = $2", month, account
            )
        return CommittedSpending(float(usd), bool(first))

    return read


class RedisLimits:
    """Token buckets and reservations in Redis, with one script call per decision. Spending comes
    from the ledger in PostgreSQL, from which a lost hash is restored."""

    def __init__(self, pipe: ValkeyPipe, read: ReadSpending) -> None:
        self._read = read
        self._decide, self._seed = pipe.script(DECIDE), pipe.script(SEED)
        self._settle, self._renew = pipe.script(SETTLE), pipe.script(RENEW)

    async def decide(self, request: LimitRequest, /) -> Verdict:
        account, budget = request.account, request.account.usd_per_month
        values = (
            account.requests_per_minute or 0,
            -1 if budget is None else budget,
            -1 if budget is None else with_tolerance(budget),
            request.month,
            request.reservation,
            request.paid,
            -1 if request.usd is None else request.usd,
            LEASE_SECONDS * 1000,
            int(KEPT_DAYS * 86_400_000),
        )
        for _ in range(MAX_SEEDS):
            kind, seconds = await self._decide([_key(account.id)], values)
            if kind != b"unseeded":
                return Verdict(kind.decode(), float(seconds))
            await self._seed_from_ledger(account.id, request.month)
        return Verdict("grace", GRACE_SECONDS)  # reservations keep expiring: try again later

    async def settle(self, account: str, month: str, reservation: str, spent: float, /) -> None:
        await self._settle([_key(account)], [month, reservation, spent])

    async def renew(self, reservations: Sequence[Renewal], /) -> None:
        by_account: dict[str, list[str | float]] = {}
        for account, reservation, usd in reservations:
            by_account.setdefault(account, []).extend((reservation, usd))
        lease = int(LEASE_SECONDS * 1000)
        renewals = (self._renew([_key(one)], [lease, *held]) for one, held in by_account.items())
        await asyncio.gather(*renewals)

    async def _seed_from_ledger(self, account: str, month: str) -> None:
        spent = await self._read(account, month)
        grace = 0 if spent.is_first else int(GRACE_SECONDS * 1000)
        await self._seed([_key(account)], [month, spent.usd, grace, int(KEPT_DAYS * 86_400_000)])


def _key(account: str) -> str:
    return f"bottega:limit:{account}"
