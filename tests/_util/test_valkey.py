"""Clients of Redis: names without passwords, and translated errors."""

from __future__ import annotations

import pytest

from bottega._util.valkey import display_valkey_url, is_valkey_url, valkey_client, valkey_errors
from bottega.errors import SettingError, StoreBusyError, StoreError, StoreUnavailableError
from bottega.gateway.state.shared import check_redis
from tests.postgres import free_port
from tests.redis import RedisServer


def test_urls_are_shown_without_passwords() -> None:
    url = "rediss://user:secret@cache.example:7000/3?ssl_cert_reqs=none"
    assert display_valkey_url(url) == "redis://cache.example:7000/3"
    assert display_valkey_url("valkey://:secret@") == "redis://localhost:6379/0"
    assert is_valkey_url(url) and not is_valkey_url("postgresql://db") and not is_valkey_url(None)
    with pytest.raises(SettingError) as error:
        display_valkey_url("redis://:secret@cache:port")
    assert "secret" not in str(error.value)


def test_server_that_cannot_be_reached() -> None:
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as error:
        check_redis(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(error.value) and error.value.retryable


def test_wrong_password_is_named(redis: RedisServer) -> None:
    check_redis(redis.url)
    with pytest.raises(StoreError, match="rejects the user, the password") as error:
        check_redis(redis.url.replace("redis://", "redis://:wrong-one@"))
    assert "wrong-one" not in str(error.value) and not error.value.retryable
    assert "state.redis" in error.value.hint


async def test_lost_connection_is_opened_again(redis: RedisServer) -> None:
    client = valkey_client(redis.url)
    with valkey_errors("redis"):
        await client.set("k", "v")
        redis.stop()
        redis.start()
        assert await client.get("k") is None
    await client.aclose()


async def test_refused_command_can_be_repeated(redis: RedisServer) -> None:
    """Such as a write while the memory is full and nothing may be evicted."""
    redis.run("CONFIG", "SET", "maxmemory", "1")
    client = valkey_client(redis.url)
    try:
        with pytest.raises(StoreBusyError, match="refuses a command"), valkey_errors("redis"):
            await client.set("k", "v")
    finally:
        redis.run("CONFIG", "SET", "maxmemory", "0")
        await client.aclose()


def test_eviction_of_keys_is_a_warning(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def check(memory: str, policy: str, url: str = redis.url) -> list[str]:
        caplog.clear()
        redis.run("CONFIG", "SET", "maxmemory", memory)
        redis.run("CONFIG", "SET", "maxmemory-policy", policy)
        check_redis(url)
        return caplog.messages

    redis.run("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-info")
    limited = redis.url.replace("redis://", "redis://limited:secret@")
    try:
        assert check("0", "allkeys-lru") == check("100mb", "noeviction") == []
        assert check("100mb", "volatile-lru", limited) == []  # it may not ask
        (message,) = check("100mb", "volatile-lru")
    finally:
        redis.run("ACL", "DELUSER", "limited")
        check("0", "noeviction")
    assert "state.redis" in message and "volatile-lru" in message and "noeviction" in message
    assert redis.url in message
