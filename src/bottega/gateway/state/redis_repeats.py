"""Exact repeats and flights in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bottega._util.valkey import Argument, ValkeyPipe
from bottega.gateway.state.repeats import FLIGHT_SECONDS, MAX_CHANGES, BeginResult, Changes
from bottega.gateway.state.response_cache import CachedReply

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
RENEW = f"""
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


class RedisRepeats:
    """Replies and flights as keys that expire. Each step is one script call."""

    def __init__(self, pipe: ValkeyPipe) -> None:
        self._pipe = pipe
        self._begin, self._land, self._renew = map(pipe.script, (BEGIN, LAND, RENEW))
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
