"""State that gateways share through Redis: limits and repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from bottega._util.postgres import PostgresPool
from bottega._util.valkey import Argument, ValkeyPipe
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
RENEW_LEASES = """
local time = redis.call('TIME')
local expires = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
    redis.call('HSET', KEYS[1], 'h:' .. ARGV[i], ARGV[i + 1] .. string.format(' %.0f', expires))
end
redis.call('PEXPIRE', KEYS[1], 86400000)
"""
LEASE = int(FLIGHT_SECONDS * 1000)
REPLY, FLIGHT = "bottega:reply:", "bottega:flight:"
# One sorted set holds both the feed and the epoch, so an eviction loses both or neither. Its
# members are the changed keys, scored by number, and `ALL`, scored by the epoch, the lowest
# number. The epoch is part of the key of a reply. It is a time in microseconds, so the epoch that
# replaces a lost one never matches old replies.
FEED, ALL = "bottega:feed", "*"
EPOCH = f"""
local function text(number) return string.format('%.0f', number) end
local function begin_epoch(first)
    local time = redis.call('TIME')
    local new = text(math.max(time[1] * 1000000 + time[2], first))
    redis.call('DEL', '{FEED}')
    redis.call('ZADD', '{FEED}', new, '{ALL}')
    return new
end
local function epoch()
    local found = redis.call('ZSCORE', '{FEED}', '{ALL}')
    return found and text(found) or begin_epoch(0)
end
local function latest()
    return redis.call('ZREVRANGE', '{FEED}', 0, 0, 'WITHSCORES')[2]
end
"""
BEGIN = f"""{EPOCH}
local now = epoch()
local name = '{REPLY}' .. now .. ':' .. ARGV[1]
local reply = redis.call('HMGET', name, 'payload', 'route', 'model', 'lasts')
if reply[1] then
    local age = (tonumber(reply[4]) - redis.call('PTTL', name)) / 1000
    return {{'reply', now, reply[1], reply[2], reply[3], tostring(age)}}
end
if redis.call('SET', '{FLIGHT}' .. ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3]) then
    return {{'lead', now}}
end
return {{'wait', now}}
"""
LAND = f"""
local flight = '{FLIGHT}' .. ARGV[1]
if #ARGV > 3 then
    local name = '{REPLY}' .. ARGV[3] .. ':' .. ARGV[1]
    local lasts = ARGV[7]
    redis.call('HSET', name, 'payload', ARGV[4], 'route', ARGV[5], 'model', ARGV[6], 'lasts', lasts)
    redis.call('PEXPIRE', name, lasts)
end
if redis.call('GET', flight) == ARGV[2] then redis.call('DEL', flight) end
"""
RENEW_FLIGHT = f"""
for i = 2, #ARGV, 2 do
    local name = '{FLIGHT}' .. ARGV[i]
    local owner = redis.call('GET', name)
    if not owner then
        redis.call('SET', name, ARGV[i + 1], 'PX', ARGV[1])
    elseif owner == ARGV[i + 1] then
        redis.call('PEXPIRE', name, ARGV[1])
    end
end
"""
REPLACE = f"""{EPOCH}
local now = epoch()
local name = '{REPLY}' .. now .. ':' .. ARGV[1]
if redis.call('EXISTS', name) == 1 then
    redis.call('HSET', name, 'payload', ARGV[2], 'route', ARGV[3], 'model', ARGV[4])
end
local number = latest() + 1
redis.call('ZADD', '{FEED}', text(number), ARGV[1])
redis.call('ZREMRANGEBYSCORE', '{FEED}', '(' .. now, text(number - {MAX_CHANGES}))
"""
INVALIDATE_ALL = f"""{EPOCH}
epoch()
begin_epoch(latest() + 1)
"""
CHANGES = f"""{EPOCH}
local now = epoch()
return {{now, text(latest()), redis.call('ZRANGEBYSCORE', '{FEED}', '(' .. ARGV[1], '+inf')}}
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
        self._settle, self._renew = pipe.script(SETTLE), pipe.script(RENEW_LEASES)

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


class RedisRepeats:
    """Replies and flights as keys that expire. Each step is one script call."""

    def __init__(self, pipe: ValkeyPipe) -> None:
        self._pipe = pipe
        self._begin, self._land, self._renew = map(pipe.script, (BEGIN, LAND, RENEW_FLIGHT))
        self._replace, self._invalidate_all = pipe.script(REPLACE), pipe.script(INVALIDATE_ALL)
        self._changes = pipe.script(CHANGES)

    async def begin(self, key: str, flight: str, /) -> BeginResult:
        kind, epoch, *rest = await self._begin([], [key, flight, LEASE])
        if not rest:
            return BeginResult(kind.decode(), int(epoch))
        payload, route, model, age = rest
        reply = CachedReply(payload, route.decode(), model.decode())
        return BeginResult("reply", int(epoch), reply, float(age))

    async def land(
        self, key: str, flight: str, epoch: int, reply: CachedReply | None, seconds: float, /
    ) -> None:
        values: list[Argument] = [key, flight, epoch]
        if reply is not None:
            values += [reply.payload, reply.route, reply.model, int(seconds * 1000)]
        await self._land([], values)

    async def running(self, keys: Sequence[str], /) -> set[str]:
        found = await self._pipe.run("MGET", *(FLIGHT + key for key in keys))
        return {key for key, owner in zip(keys, found, strict=True) if owner is not None}

    async def renew(self, flights: Mapping[str, str], /) -> None:
        pairs = [part for flight in flights.items() for part in flight]
        await self._renew([], [LEASE, *pairs])

    async def replace(self, key: str, reply: CachedReply, /) -> None:
        await self._replace([], [key, reply.payload, reply.route, reply.model])

    async def invalidate_all(self) -> None:
        await self._invalidate_all([], [])

    async def changes(self, position: tuple[int, int] | None, /) -> Changes:
        epoch, last = position or (0, 0)
        found_epoch, number, keys = await self._changes([], [last])
        now = (int(found_epoch), int(number))
        # False after a new epoch, or more changes than the server keeps.
        is_complete = now[0] == epoch and now[1] < last + MAX_CHANGES
        return Changes(now, [key.decode() for key in keys] if is_complete else None)
