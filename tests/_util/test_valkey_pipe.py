"""Commands to Redis over one shared connection."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util import valkey
from bottega._util.valkey import IncompleteReplyError, ValkeyPipe, packed, parsed
from bottega.errors import StoreBusyError, StoreError, StoreUnavailableError
from tests.postgres import free_port
from tests.redis import RedisServer

ECHO = "return {ARGV[1], redis.call('INCR', KEYS[1])}"
values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40),
    lambda some: st.lists(some, max_size=4),
    max_leaves=20,
)


@pytest.fixture
async def pipe(redis: RedisServer) -> AsyncGenerator[ValkeyPipe]:
    opened = ValkeyPipe(redis.url)
    yield opened
    await opened.aclose()


def encoded(value: Any) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


@given(values)
def test_replies_are_read_only_when_complete(value: Any) -> None:
    data = encoded(value)
    assert parsed(b"+OK\r\n" + data, 5) == (value, 5 + len(data))
    for end in range(len(data)):
        with pytest.raises(IncompleteReplyError):
            parsed(data[:end], 0)


def test_commands_are_arrays_of_strings() -> None:
    command = packed(("SET", b"\0\r\n", "é", 5, -0.25))
    assert parsed(command, 0) == ([b"SET", b"\0\r\n", "é".encode(), b"5", b"-0.25"], len(command))


async def test_each_command_gets_its_own_reply(pipe: ValkeyPipe) -> None:
    echo = pipe.script(ECHO)
    found = await asyncio.gather(*(echo(["n"], [f"{i}"]) for i in range(300)))
    assert [text for text, _ in found] == [b"%d" % i for i in range(300)]
    assert sorted(count for _, count in found) == list(range(1, 301))
    large = b"\r\n" * 1_000_000
    assert await pipe.run("SET", "large", large) == b"OK"
    found = await asyncio.gather(*(pipe.run("GET", name) for name in ("large", "none", "large")))
    assert found == [large, None, large]


async def test_cancelled_caller_takes_no_reply_of_others(pipe: ValkeyPipe) -> None:
    await pipe.run("PING")
    cancelled = asyncio.create_task(pipe.run("ECHO", "a"))
    others = [asyncio.create_task(pipe.run("ECHO", f"{i}")) for i in range(5)]
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await asyncio.gather(*others) == [b"0", b"1", b"2", b"3", b"4"]


async def test_lost_connection_is_opened_again(pipe: ValkeyPipe, redis: RedisServer) -> None:
    echo = pipe.script(ECHO)
    assert await echo(["n"], ["a"]) == [b"a", 1]
    redis.stop()
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        await echo(["n"], ["b"])
    redis.start()
    found = await asyncio.gather(*(echo(["n"], ["c"]) for _ in range(20)))
    assert sorted(count for _, count in found) == list(range(1, 21))  # it has lost script and data


async def test_refused_command_affects_no_other(pipe: ValkeyPipe, redis: RedisServer) -> None:
    redis.run("CONFIG", "SET", "maxmemory", "1")
    try:
        replies: list[Any] = await asyncio.gather(
            *(pipe.run(*one) for one in (("SET", "k", "v"), ("PING",))), return_exceptions=True
        )
    finally:
        redis.run("CONFIG", "SET", "maxmemory", "0")
    assert isinstance(replies[0], StoreBusyError) and "refuses a command" in str(replies[0])
    assert replies[1] == b"PONG"
    with pytest.raises(StoreBusyError, match="refuses"):
        await pipe.script("return redis.call('NOTHING')")([], [])


async def test_stuck_server_is_disconnected(
    pipe: ValkeyPipe, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "ANSWER_SECONDS", 0.2)
    assert await pipe.run("PING") == b"PONG"
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(2):
            first = asyncio.create_task(pipe.run("PING"))
            await asyncio.sleep(0.05)
            later = asyncio.create_task(pipe.run("PING"))  # waits for the reply to the first one
            for one in (first, later):
                with pytest.raises(StoreUnavailableError):
                    await one
    finally:
        redis.process.send_signal(signal.SIGCONT)
    assert await pipe.run("PING") == b"PONG"


async def test_url_selects_the_database_and_password(redis: RedisServer) -> None:
    first, second = ValkeyPipe(redis.url), ValkeyPipe(redis.url.removesuffix("/0") + "/3")
    wrong = ValkeyPipe(redis.url.replace("redis://", "redis://:secret@"))
    await first.run("SET", "k", "v")
    assert await second.run("GET", "k") is None
    with pytest.raises(StoreError, match="rejects the user, the password") as error:
        await wrong.run("PING")
    assert "secret" not in str(error.value)
    nowhere = ValkeyPipe(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailableError):
        await nowhere.run("PING")
    for pipe in (first, second, wrong, nowhere):
        await pipe.aclose()


async def test_a_closed_pipe_does_not_connect_again(redis: RedisServer) -> None:
    pipe = ValkeyPipe(redis.url)
    commands = [asyncio.create_task(pipe.run("PING")) for _ in range(3)]
    await asyncio.sleep(0)  # the first one connects
    await pipe.aclose()
    await asyncio.gather(*commands, return_exceptions=True)
    with pytest.raises(StoreError, match="is closed"):
        await pipe.run("PING")
