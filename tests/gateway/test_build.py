from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bottega.errors import SettingError, StoreError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import KeySettings
from bottega.gateway.running.build import build
from bottega.gateway.running.cache_views import cache_location
from bottega.gateway.running.server import GatewayServer
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.embedders.names import NOTE
from bottega.naming import has_photos
from bottega.reranking import GatedReranker
from bottega.routing import BudgetRouter, CoverageRouter
from bottega.types import Candidate, Example, Query
from tests.builders import EarlierPhotos, solid_image
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok, reply


def test_configured_gateway_stores_and_shows_examples(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("seven")]
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        _, first = ask(url, "What is 3 + 4?")
        reply, second = ask(url, "What is 4 + 3?")
        _, third = ask(url, "What is 4 + 3?", model="gpt-4o")
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=20) as response:
            metrics = response.read().decode()
    assert reply["choices"][0]["message"]["content"] == "seven"
    assert (first["x-bottega-route"], second["x-bottega-route"]) == ("large", "small")
    assert len(first["x-bottega-stored"]) > 8
    assert second["x-bottega-demonstrations"] == "1"
    assert third["x-bottega-cache"] == "replayed"
    request = [body for body in endpoint.bodies if body]
    assert [body["model"] for body in request] == ["huge", "qwen"]
    assert [turn["content"] for turn in request[1]["messages"]] == [
        "What is 3 + 4?",
        "seven",
        "What is 4 + 3?",
    ]
    assert 'requests_total{route="small",state="answered",status="200"} 1.0' in metrics
    assert 'stage_seconds_count{stage="store"} 1.0' in metrics
    assert 'breaker_state{route="large"} 0.0' in metrics
    assert "upstream_seconds_count 2.0" in metrics
    assert "bottega_ready 1.0" in metrics
    ledger = Ledger(tmp_path / FILE)
    rows = ledger.read("SELECT tier, state FROM gateway_entries ORDER BY time")
    assert (rows, ledger.master()) == (
        [("large", "answered"), ("small", "answered"), ("small", "replayed")],
        "large",
    )
    ledger.close()


def test_tier_limits_a_request_without_a_token_limit(endpoint: Server, tmp_path: Path) -> None:
    config = gateway_config(tmp_path, endpoint.url)
    tiers = tuple(dataclasses.replace(tier, max_tokens=33) for tier in config.tiers)
    gateway_server = build(dataclasses.replace(config, tiers=tiers), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        ask(url, "What is 3 + 4?")
    assert [body["max_tokens"] for body in endpoint.bodies if body] == [33]
    assert {one.max_tokens for one in gateway_server.tier_set.served} == {33}


def test_configuration_selects_the_fallback(endpoint: Server, tmp_path: Path) -> None:
    text = gateway_config(tmp_path, endpoint.url)
    never = dataclasses.replace(text, route=dataclasses.replace(text.route, fallback="never"))
    gateway_server = build(never, ENVIRONMENT)

    async def answer(request: web.Request) -> web.StreamResponse:
        asks_master = request.method == "POST" and (await request.json())["model"] == "huge"
        return await (reply(None, status=401) if asks_master else ok("seven"))(request)

    endpoint.answers = [answer]
    with run_gateway(gateway_server) as url:
        with pytest.raises(
            urllib.error.HTTPError
        ) as refused:  # the master rejects the first request
            ask(url, "What is 3 + 4?")
        with refused.value as error:
            assert error.code == 502
        assert ask(url, "What is 4 + 3?")[1]["x-bottega-route"] == "small"


def test_fallback_tier_is_not_shown_dissimilar_examples(endpoint: Server, tmp_path: Path) -> None:
    config = gateway_config(tmp_path, endpoint.url, "min_similarity = 0.9\n")
    calls = [0]

    async def answer(request: web.Request) -> web.StreamResponse:
        asks_master = request.method == "POST" and (await request.json())["model"] == "huge"
        calls[0] += asks_master
        is_down = asks_master and calls[0] > 1
        return await (reply(None, status=401) if is_down else ok("seven"))(request)

    endpoint.answers = [answer]
    cold = dataclasses.replace(config, route=dataclasses.replace(config.route, cold_start=2))
    with run_gateway(build(cold, ENVIRONMENT)) as url:
        assert ask(url, "What is 3 + 4?")[1]["x-bottega-route"] == "large"
        far = ask(url, "Which animal is this?")[1]
        assert (far["x-bottega-fallback"], far["x-bottega-demonstrations"]) == ("large", "0")
        near = ask(url, "What is 4 + 3?")[1]
        assert near["x-bottega-demonstrations"] == "1"


def test_similarity_is_reported_for_every_tier(endpoint: Server, tmp_path: Path) -> None:
    more = "min_similarity = 0.9\n"
    config = gateway_config(tmp_path, endpoint.url, more)
    covered = dataclasses.replace(config.route, router="coverage", min_similarity=1.0, cold_start=1)
    endpoint.answers = [ok("seven")]
    gateway_server = build(dataclasses.replace(config, route=covered), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        cold = ask(url, "What is 3 + 4?")[1]
        headers = ask(url, "What is 5 + 9?")[1]
        exposition = gateway_server.metrics.exposition().decode()
    assert "x-bottega-similarity" not in cold  # no retrieval
    assert (headers["x-bottega-route"], headers["x-bottega-demonstrations"]) == ("large", "0")
    assert 0.3 < float(headers["x-bottega-similarity"]) < 0.9
    assert "bottega_similarity_count 1.0" in exposition


def test_key_is_sent_to_its_own_endpoint_only(endpoint: Server, tmp_path: Path) -> None:
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        ask(url, "one", model="bottega/small")
        ask(url, "two", model="bottega/large")
    keys = [
        headers.get("Authorization")
        for body, headers in zip(endpoint.bodies, endpoint.headers, strict=True)
        if body
    ]
    assert keys == [None, "Bearer sk-of-the-large-one"]
    assert gateway_server.tier_set.secrets == ("sk-of-the-large-one",)


def test_examples_survive_a_restart(endpoint: Server, tmp_path: Path) -> None:
    for expected, text in (
        ("large", "What?"),
        ("small", "What else?"),
    ):  # the second start loads stored examples
        with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)) as url:
            assert ask(url, text)[1]["x-bottega-route"] == expected


def test_missing_packages_and_keys_are_reported_before_start(tmp_path: Path) -> None:
    config = gateway_config(tmp_path / "data", "http://localhost:9/v1")
    with pytest.raises(SettingError, match="LARGE_KEY is not set"):
        build(config, {})
    assert not (tmp_path / "data").exists()
    openai = parse_config('[tiers.only]\nmodel = "openai:gpt"')
    with pytest.raises(SettingError, match="OPENAI_API_KEY is not set"):
        build(openai, {})
    priced = '[tiers.{}]\nmodel = "openai:x"\nbase_url = "http://localhost:9/v1"\nprice = [{}, 1]\n'
    with pytest.raises(SettingError, match="different prices"):
        build(parse_config(priced.format("a", 1) + priced.format("b", 2)), {})


def test_invalid_cache_file_is_reported_before_start(tmp_path: Path) -> None:
    """Otherwise every request would fail, with the reason only in the log."""
    (tmp_path / "cache.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"cache\.db is not a knowledge base"):
        build(gateway_config(tmp_path, "http://localhost:9/v1"), ENVIRONMENT)
    (tmp_path / "cache.db").write_bytes(b"")
    asyncio.run(build(gateway_config(tmp_path, "http://localhost:9/v1"), ENVIRONMENT).aclose())


def test_a_budget_needs_prices(tmp_path: Path) -> None:
    by = '[route]\nrouter = "budget"\nusd_per_1k = 1.0\n'
    tier = '[tiers.{}]\nmodel = "openai:{}"\nbase_url = "http://localhost:9/v1"\n'
    text = f'[gateway]\ndata = "{tmp_path}"\n{by}' + tier.format("a", "unpriced-model")
    with pytest.raises(SettingError, match=r"price of tiers\.a") as error:
        build(parse_config(text + tier.format("b", "gpt-4.1")), {})
    assert "price = [" in error.value.hint


def test_a_budget_pays_for_shadow_samples(endpoint: Server, tmp_path: Path) -> None:
    more = "[shadow]\nrate = 1.0\n"
    config = gateway_config(tmp_path, endpoint.url, more)
    route = dataclasses.replace(config.route, router="budget", usd_per_1k=0.02)
    endpoint.answers = [ok("seven")]
    gateway_server = build(dataclasses.replace(config, route=route), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        ask(url, "What is 1 + 1?")  # the cold start
        ask(url, "What is 1 + 2?")  # the gateway learns the price of the large tier
        before = _saved(gateway_server)
        ask(url, "What is 1 + 3?")
        end = time.monotonic() + 20
        while (spent := before - _saved(gateway_server)) < 100e-6:
            assert time.monotonic() < end, spent
            time.sleep(0.02)


def _saved(gateway_server: GatewayServer) -> float:
    tenants: Any = gateway_server.tenants
    route: Any = tenants._opened[""].result()[0].pipeline.route
    saved: float = route._then._saved
    return saved


def test_embedder_mismatch_is_reported(endpoint: Server, tmp_path: Path) -> None:
    with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)) as url:
        ask(url, "What?")
    config = gateway_config(tmp_path, endpoint.url)
    other = dataclasses.replace(config, cache=dataclasses.replace(config.cache, embed="pixels"))
    with pytest.raises(
        SettingError, match=r"cache.embed is 'pixels'.* filled with 'words'"
    ) as error:
        build(other, ENVIRONMENT)
    assert "reindex" in error.value.hint


@pytest.mark.skipif(not has_photos(), reason="needs the extra [photos]")
def test_a_cache_with_earlier_vectors_of_photographs_is_reported(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1", embed="photos")
    file = cache_location(config)
    with KnowledgeBase.open(file.target, EarlierPhotos("tower-256 0123456789ab")) as cache:
        cache.add([Example(Query("What?", (solid_image(1),)), "a shade")])
        cache.set_note(NOTE, "photos")
    with pytest.raises(SettingError, match="was filled with 'tower-256") as error:
        build(config, ENVIRONMENT)
    assert error.value.hint == f"run bottega reindex {file} --embed photos"


def test_keys_are_required_in_public_and_if_any_exist(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1")
    public = config.override(host="0.0.0.0", port=None, data=None)
    with pytest.raises(SettingError, match="there is no valid one") as error:
        build(public, ENVIRONMENT)
    assert "bottega keys add" in error.value.hint
    accounts = Accounts(tmp_path / FILE)
    made, token = accounts.add("ann")
    for one in (public, config):  # with a proxy, even loopback is public
        gateway_server = build(one, ENVIRONMENT)
        assert gateway_server.gateway.authenticate is not None
        account = gateway_server.gateway.authenticate(token)
        assert account is not None and account.id == made.id
        asyncio.run(gateway_server.aclose())
    accounts.revoke(made.id)
    accounts.close()
    with pytest.raises(
        SettingError, match="there is no valid one"
    ):  # not open to clients without a key
        build(config, ENVIRONMENT)
    with closing(Accounts(tmp_path / FILE)) as accounts:
        accounts.add("ben", expires=time.time() - 1)
        accounts.add("eve", viewer=True)
    with pytest.raises(SettingError, match="there is no valid one"):
        build(config, ENVIRONMENT)
    open_config = dataclasses.replace(config, keys=KeySettings(required=False))
    gateway_server = build(open_config, ENVIRONMENT)
    assert gateway_server.gateway.authenticate is None
    asyncio.run(gateway_server.aclose())


def test_gate_state_survives_a_restart(tmp_path: Path) -> None:
    more = "[shadow]\nrate = 1.0\ngate = true\n"
    config = gateway_config(tmp_path, "http://localhost:9/v1", more)

    async def gate(samples: int) -> Any:
        gateway_server = build(config, ENVIRONMENT)
        try:
            tenant = await gateway_server.tenants.open("team")
            assert gateway_server.gateway.shadow is not None
            assert isinstance(tenant.pipeline.rerank, GatedReranker)
            assert tenant.ungated is not None
            assert not isinstance(tenant.ungated.rerank, GatedReranker)
            measure: Any = tenant.shadow
            for _ in range(samples):
                measure.gate.learn([_near()], 1.0, 0.0)
            state = measure.gate.state()
            gateway_server.ledger.set_gate("team", "nearest", json.dumps(state))
            return state
        finally:
            await gateway_server.aclose()

    before = asyncio.run(gate(25))
    assert asyncio.run(gate(0)) == before
    assert len(before["samples"]) == 25


@pytest.mark.parametrize("gated", [True, False])
async def test_gate_without_samples_measures_every_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gated: bool
) -> None:
    more = f"[shadow]\nrate = 1e-9\ngate = {str(gated).lower()}\n"
    gateway_server = build(gateway_config(tmp_path, "http://localhost:9/v1", more), ENVIRONMENT)
    try:
        with caplog.at_level("INFO"):
            measure: Any = (await gateway_server.tenants.open("team")).shadow
        assert measure.begins() is gated
        assert caplog.text.count("has too few samples") == gated
        for _ in range(20):
            measure.gate.learn([_near()], 1.0, 0.0)
        assert not measure.begins()
    finally:
        await gateway_server.aclose()


def _near() -> Candidate:
    return Candidate(Example(Query("q"), "a", id="1"), 0.9)


@pytest.mark.parametrize(
    ("by", "router", "asks"),
    [
        ("'budget'\nusd_per_1k = 4", BudgetRouter, {}),
        ("'coverage'\nmin_similarity = 0.9", CoverageRouter, {}),
        ("'confidence'\nmin_confidence = 0.5", None, {"logprobs": True}),
        ("'confidence'\nmin_confidence = 0.5\nsamples = 3", None, {"n": 3}),
    ],
)
async def test_every_route_is_built(
    tmp_path: Path, by: str, router: type | None, asks: dict[str, object]
) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1")
    text = f"[tiers.x]\nmodel = 'openai:a'\n[tiers.y]\nmodel = 'openai:b'\n[route]\nrouter = {by}"
    route = parse_config(text).route
    gateway_server = build(dataclasses.replace(config, route=route), ENVIRONMENT)
    try:
        tenant = await gateway_server.tenants.open("")
        pipeline = tenant.pipeline
        assert router is None or isinstance(pipeline.route, router)
        assert (pipeline.escalate is not None) == bool(asks)
        assert tenant.confidence_fields == ({"small": asks} if asks else {})
    finally:
        await gateway_server.aclose()


async def test_counting_continues_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_server = build(gateway_config(tmp_path, "http://localhost:9/v1"), ENVIRONMENT)
    failures = [StoreError("cache.db is closed")]
    counted, loop = asyncio.Event(), asyncio.get_running_loop()

    def counts() -> dict[str, int]:
        if failures:
            raise failures.pop()
        loop.call_soon_threadsafe(counted.set)
        return {"": 3}

    monkeypatch.setattr("bottega.gateway.running.server.COUNT_SECONDS", 0.01)
    monkeypatch.setattr(gateway_server.tenants, "counts", counts)
    counting = asyncio.create_task(gateway_server._count())
    await asyncio.wait_for(counted.wait(), 5)
    counting.cancel()
    await gateway_server.aclose()


def test_prices_of_servers_are_in_the_ledger(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1")
    small, large = config.tiers
    tiers = (dataclasses.replace(small, usd_per_hour=1.5), large)
    server = build(dataclasses.replace(config, tiers=tiers), ENVIRONMENT)
    assert server.ledger.hourly_prices() == {"small": 1.5, "large": 0.0}
    asyncio.run(server.aclose())
