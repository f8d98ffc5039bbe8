"""Access limits of a key: concurrent requests, tiers and namespaces."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bottega._util.caching import CLIENT
from bottega.errors import SettingError
from bottega.gateway.accounting.access import Access, KeyDefaults
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.running.build import build
from bottega.gateway.running.caches import NamespacePool
from bottega.gateway.running.server import GatewayServer
from bottega.openai_api.errors import ApiError
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Answer, Server, ok, refuse


def http_error_of(work: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        work()
    with caught.value as error:
        return error.code, json.load(error)["error"]["code"]


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Callable[..., str]]:
    accounts = Accounts(tmp_path / FILE)
    yield lambda name, **more: accounts.add(name, **more)[1]
    accounts.close()


def gateway_server(endpoint: Server, folder: Path, more: str = "") -> GatewayServer:
    return build(gateway_config(folder, endpoint.url, more), ENVIRONMENT)


def test_key_with_a_concurrency_limit_leaves_slots_free(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    greedy, other = keys("greedy"), keys("other")
    more = keys("more", max_concurrent=3)
    go = threading.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.to_thread(go.wait, 10)
        return await ok("seven")(request)

    config = gateway_config(tmp_path, endpoint.url)
    config = dataclasses.replace(
        config, gateway=dataclasses.replace(config.gateway, max_concurrent=8)
    )
    gateway = build(config, ENVIRONMENT)
    with run_gateway(gateway) as url, ThreadPoolExecutor(8) as clients:
        endpoint.answers = [slow]
        half = [clients.submit(ask, url, f"greedy {n}", key=greedy) for n in range(4)]
        _wait_until(lambda: gateway.app.in_flight == 4)
        assert b"bottega_requests_in_flight 4.0" in gateway.metrics.exposition()
        again = http_error_of(lambda: ask(url, "greedy again", key=greedy))
        assert again == (429, "too_many_concurrent_requests")
        _wait_until(lambda: gateway.app.in_flight == 4)
        three = [clients.submit(ask, url, f"more {n}", key=more) for n in range(3)]
        _wait_until(lambda: gateway.app.in_flight == 7)
        assert http_error_of(lambda: ask(url, "more again", key=more))[0] == 429
        last = clients.submit(ask, url, "other", key=other)
        _wait_until(lambda: gateway.app.in_flight == 8)
        go.set()
        answers = [one.result(20)[0] for one in [*half, *three, last]]
        assert {one["choices"][0]["message"]["content"] for one in answers} == {"seven"}
        assert ask(url, "greedy once more", key=greedy)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


FORCED: list[dict[str, Any]] = [
    {"model": "bottega/large"},
    {"model": "bottega:route=large"},
    {"model": "bottega:master-rate=1"},
    {"model": "bottega/small"},
]


@pytest.mark.parametrize("forced", FORCED, ids=lambda one: str(one["model"]))
def test_key_cannot_choose_a_tier_without_permission(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str], forced: dict[str, Any]
) -> None:
    plain, all_tiers = keys("plain"), keys("all", tiers=["*"])
    cheap, admin = keys("cheap", tiers=["small"]), keys("op", admin=True)
    with run_gateway(gateway_server(endpoint, tmp_path)) as url:
        assert http_error_of(lambda: ask(url, "What?", key=plain, **forced)) == (
            403,
            "tier_forbidden",
        )
        assert ask(url, "What?", key=all_tiers, **forced)[0]
        assert ask(url, "What?", key=admin, **forced)[0]
        assert ask(url, "What?", key=plain)[0]
        if forced["model"] == "bottega/small":
            assert ask(url, "What?", key=cheap, **forced)[0]
        else:
            assert http_error_of(lambda: ask(url, "What?", key=cheap, **forced))[0] == 403


HELLO = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PASSING: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"messages": [HELLO, {"role": "assistant", "content": ""}]},
    {"messages": [HELLO, {"role": "system", "content": "Be brief."}]},
    {"messages": [{"role": "user", "content": " "}]},
]


def test_pass_through_reaches_the_master_only_with_permission(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    plain, cheap, none = keys("plain"), keys("cheap", tiers=["small"]), keys("none", tiers=[])
    right, admin = keys("right", tiers=["large"]), keys("op", admin=True)
    with run_gateway(gateway_server(endpoint, tmp_path)) as url:
        for fields in PASSING:
            routes = {
                key: ask(url, "hello", key=key, **fields)[1]["x-bottega-route"]
                for key in (plain, cheap, none, right, admin)
            }
            assert routes == {
                plain: "large",
                cheap: "small",
                none: "small",
                right: "large",
                admin: "large",
            }


def test_tools_reach_the_cheapest_tier_that_supports_them(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    plain = keys("plain", tiers=["small"])
    config = gateway_config(tmp_path, endpoint.url)
    small, large = config.tiers
    small = dataclasses.replace(small, tools=False)
    with run_gateway(build(dataclasses.replace(config, tiers=(small, large)), ENVIRONMENT)) as url:
        headers = ask(url, "hello", key=plain, tools=TOOLS)[1]
        assert headers["x-bottega-route"] == "large"


TOO_LONG = "This model's maximum context length is 8192 tokens (context_length_exceeded)."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [refuse(400, TOO_LONG), refuse(500, retry_after="0")],
    ids=["too long", "down"],
)
def test_fallback_reaches_the_master_only_with_permission(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str], answer: Answer, stream: bool
) -> None:
    """A client causes such a failure with a large `max_tokens`."""
    none, right = keys("none", tiers=[]), keys("right", tiers=["large"])

    async def fail_small(request: web.Request) -> web.StreamResponse:
        large = (await request.json())["model"] == "huge"
        return await (ok("seven") if large else answer)(request)

    with run_gateway(gateway_server(endpoint, tmp_path)) as url:
        endpoint.answers = [fail_small]
        endpoint.bodies.clear()
        fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 9000, "stream": stream}
        assert http_error_of(lambda: ask(url, "hello", key=none, **fields))[0] in (400, 503)
        assert "huge" not in {body["model"] for body in endpoint.bodies if body}
        assert ask(url, "hello", key=right, tools=TOOLS)[1]["x-bottega-route"] == "large"


def test_configuration_sets_the_default_tiers_of_keys(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    plain, none = keys("plain"), keys("none", tiers=[])
    with run_gateway(gateway_server(endpoint, tmp_path, '[keys]\ntiers = ["large"]\n')) as url:
        assert _models(url, plain) >= {"bottega", "gpt-4o", "bottega/large"}
        assert "bottega/small" not in _models(url, plain)
        assert not any(id.startswith("bottega/") for id in _models(url, none))
        assert ask(url, "What?", key=plain, model="bottega/large")[0]
        assert http_error_of(lambda: ask(url, "What?", key=none, model="bottega/large"))[0] == 403


def _models(url: str, key: str) -> set[str]:
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return {one["id"] for one in json.load(reply)["data"]}


def test_gateway_without_keys_allows_every_tier(endpoint: Server, tmp_path: Path) -> None:
    with run_gateway(gateway_server(endpoint, tmp_path)) as url:
        assert ask(url, "What?", model="bottega/large")[1]["x-bottega-route"] == "large"
        assert ask(url, "What?", model="bottega:namespace=any")[0]


def test_namespace_limit_of_a_key_survives_a_restart(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    key = keys("a", namespace="a", max_namespaces=2)
    other = keys("other", namespace="a")
    with run_gateway(gateway_server(endpoint, tmp_path, "[keys]\nmax_namespaces = 3\n")) as url:
        for name in ("a/1", "a/2", "a", "a/1"):
            assert ask(url, "What?", key=key, model=f"bottega:namespace={name}")[0]
        third = http_error_of(lambda: ask(url, "What?", key=key, model="bottega:namespace=a/3"))
        assert third == (403, "too_many_namespaces")
    with run_gateway(gateway_server(endpoint, tmp_path, "[keys]\nmax_namespaces = 3\n")) as url:
        assert ask(url, "What?", key=key, model="bottega:namespace=a/2")[0]
        assert (
            http_error_of(lambda: ask(url, "What?", key=key, model="bottega:namespace=a/3"))[0]
            == 403
        )
        for name in ("a/3", "a/4", "a/5"):
            assert ask(url, "What?", key=other, model=f"bottega:namespace={name}")[0]
        assert (
            http_error_of(lambda: ask(url, "What?", key=other, model="bottega:namespace=a/6"))[0]
            == 403
        )
    # Metrics and ledger leave out refused names: otherwise they would grow without limit.
    [ledger] = tmp_path.rglob("gateway.db")
    with closing(sqlite3.connect(ledger)) as connection:
        found = connection.execute(
            "SELECT namespace FROM gateway_entries WHERE status = 403"
        ).fetchall()
    assert found == [("a",)] * 3


def test_ended_request_frees_one_slot() -> None:
    access = Access(lambda id, namespace, most: True)
    two, other = Account("1", "two", max_concurrent=2), Account("2", "other", max_concurrent=1)
    for _ in range(3):
        access.enter(two)
        access.enter(two)
        access.enter(other)
        for account in (two, other):
            with pytest.raises(ApiError, match="concurrent requests"):
                access.enter(account)
        access.leave(two)
        access.enter(two)
        with pytest.raises(ApiError) as caught:
            access.enter(two)
        assert (caught.value.status, caught.value.headers) == (429, {"retry-after": "1"})
        for account in (two, two, other):
            access.leave(account)


def test_key_without_a_limit_has_the_default_limit() -> None:
    access = Access(lambda id, namespace, most: True, KeyDefaults(max_concurrent=1))
    access.enter(Account("1", "a"))
    with pytest.raises(ApiError, match="limit of concurrent requests, 1"):
        access.enter(Account("1", "a"))


def test_tiers_of_a_key_default_to_the_configured_ones() -> None:
    access = Access(lambda id, namespace, most: True, KeyDefaults(tiers=("small",)))
    plain, none = Account("1", "plain"), Account("2", "none", tiers=())
    large, admin = Account("3", "large", tiers=("large",)), Account("4", "op", admin=True)
    wild = Account("5", "all", tiers=("*",))
    assert [access.may_choose(one, "small") for one in (plain, none, large, admin, wild)] == [
        *(True, False, False, True, True)
    ]
    assert [access.may_reach(one, "large") for one in (plain, none, large, admin, wild)] == [
        *(False, False, True, True, True)
    ]
    undecided = Access(lambda id, namespace, most: True)
    assert undecided.may_reach(plain, "large") and not undecided.may_choose(plain, "large")
    assert not undecided.may_reach(none, "large")
    access.check_tiers(plain, ["small"])
    with pytest.raises(ApiError, match="'large'"):
        access.check_tiers(plain, ["small", "large"])


async def test_a_namespace_is_claimed_once_and_counts_against_the_limit_of_the_key() -> None:
    claims: list[tuple[str, str, int]] = []

    def claim(id: str, namespace: str, most: int) -> bool:
        claims.append((id, namespace, most))
        return most > 0

    access = Access(claim, KeyDefaults(max_namespaces=5))
    plain, none = Account("1", "a", namespace="a"), Account("2", "b", max_namespaces=0)
    for _ in range(2):
        await access.check_namespace(plain, "a/b")
    with pytest.raises(ApiError, match="limit of namespaces below its own, 0"):
        await access.check_namespace(none, "b/c")
    assert claims == [("1", "a/b", 5), ("2", "b/c", 0)]


async def test_admin_keys_use_any_namespace() -> None:
    access = Access(lambda id, namespace, most: False, KeyDefaults())
    await access.check_namespace(Account("1", "op", admin=True), "any")
    await access.check_namespace(Account("2", "a", namespace="a"), "a")
    with pytest.raises(ApiError, match="below its own, 16"):
        await access.check_namespace(Account("2", "a", namespace="a"), "a/b")


async def test_opening_many_namespaces_does_not_delay_other_keys() -> None:
    """Opening 400 namespaces took 12 s, during which all other keys waited."""
    opened: list[str] = []
    go = threading.Event()

    def open_one(namespace: str) -> Any:
        go.wait(10)
        opened.append(namespace)
        raise SettingError("no cache here", hint="")

    tenants = NamespacePool(open_one, 8)

    def opening(client: str, namespace: str) -> asyncio.Task[Any]:
        token = CLIENT.set(client)
        try:
            return asyncio.create_task(tenants.open(namespace))
        finally:
            CLIENT.reset(token)

    many = [opening("greedy", f"greedy/{n}") for n in range(50)]
    await asyncio.sleep(0.01)
    victim = opening("victim", "victim")
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(victim, *many, return_exceptions=True)
    assert opened.index("victim") <= 2
    await tenants.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent": 0},
        {"max_namespaces": -1},
        {"tiers": ["small", "no tier"]},
        {"tiers": [1]},
    ],
)
def test_invalid_limits_are_rejected(tmp_path: Path, wrong: dict[str, Any]) -> None:
    accounts = Accounts(tmp_path / FILE)
    with pytest.raises(SettingError):
        accounts.add("team", **wrong)
    assert accounts.list() == []
    accounts.close()


def test_a_rate_of_one_is_in_the_singular(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str]
) -> None:
    key = keys("slow", requests_per_minute=1)
    with run_gateway(gateway_server(endpoint, tmp_path)) as url:
        ask(url, "What?", key=key)
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, "Why?", key=key)
        with refused.value as error:
            assert "may send 1 request per minute;" in json.load(error)["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/files", "/files/file-1", "/files/file-1/content")),
        *(("GET", path) for path in ("/batches", "/batches/batch_1", "/responses/resp_1")),
        *(("POST", path) for path in ("/files", "/batches", "/batches/batch_1/cancel")),
        *(("POST", "/feedback"), ("DELETE", "/files/file-1"), ("DELETE", "/responses/resp_1")),
    ],
)
def test_the_rate_of_a_key_covers_requests_without_a_model(
    endpoint: Server, tmp_path: Path, keys: Callable[..., str], method: str, path: str
) -> None:
    limited, free = keys("limited", requests_per_minute=2), keys("free")
    spent = keys("spent", usd_per_month=0.0)  # its results stay readable
    with run_gateway(gateway_server(endpoint, tmp_path, "[responses]\nstore = true")) as url:

        def status(key: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(url + path, headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=20) as reply:
                    return reply.status, ""
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.headers.get("retry-after", "")

        answered = {200, 400, 404}
        assert {status(limited)[0], status(limited)[0]} <= answered
        code, wait = status(limited)
        assert code == 429 and 0 < int(wait) <= 30
        assert {status(key)[0] for key in (free, free, free, spent)} <= answered
