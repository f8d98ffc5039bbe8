from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import uvicorn
from aiohttp import web

from bottega.errors import SettingError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.accounting.reports import EntryFilter, list_requests
from bottega.gateway.asgi import Admission
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.config.overrides import Overrides
from bottega.gateway.running.build import build
from bottega.gateway.running.process import RELOADED, DrainingServer, reload
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import DONE_EVENT, to_event
from bottega.types import Usage
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.test_experiments import chat
from tests.server import Server

CHANGED = """
[limits]
images = 2
request_pixels = 1000
body_mb = 7
fields = ["guided_choice"]
[keys]
tiers = ["large"]
max_concurrent = 3
"""


def changed(config: Config, more: str = CHANGED) -> Config:
    new = gateway_config(config.gateway.data, "http://localhost:9/v1", more)
    listening = dataclasses.replace(
        new.gateway,
        max_concurrent=5,
        allowed_hosts=("gate.local",),
        allowed_origins=("https://app.example",),
        finish_seconds=9.0,
    )
    small, large = new.tiers
    repriced = dataclasses.replace(small, price=(7.0, 7.0), timeout=3.0)
    return dataclasses.replace(new, gateway=listening, tiers=(repriced, large))


async def test_reload_applies_settings_and_logs_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1")
    gateway_server = build(config, ENVIRONMENT)
    before = gateway_server.tier_set.prices("qwen", Usage(1_000_000, 0))
    with caplog.at_level(logging.INFO):
        reload(gateway_server, lambda: changed(config))
    gateway, access = gateway_server.gateway, gateway_server.gateway.access
    assert access is not None
    assert (gateway.limits.images, gateway.limits.request_pixels) == (2, 1000)
    assert gateway.limits.body_mb == 20
    assert gateway.allowed_hosts == ("gate.local",)
    assert gateway.allowed_origins == ("https://app.example",)
    assert gateway.more_fields == {"guided_choice"}
    assert (gateway_server.app.limit, gateway.completer.finish_seconds) == (5, 9.0)
    assert (before, gateway_server.tier_set.prices("qwen", Usage(1_000_000, 0))) == (1.0, 7.0)
    team = Account("1", "team")
    access.check_tiers(team, ["large"])
    for _ in range(3):
        access.enter(team)
    with pytest.raises(ApiError, match="concurrent requests, 3"):
        access.enter(team)
    reloaded, waiting = (record.getMessage() for record in caplog.records)
    assert "limits.images" in reloaded and "tiers.small.price" in reloaded
    assert "body_mb" not in reloaded
    assert waiting.endswith("restart: tiers.small.timeout, limits.body_mb")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        reload(gateway_server, lambda: changed(config))
    assert caplog.records[0].getMessage().endswith("changed: nothing")
    await gateway_server.aclose()


async def test_share_of_an_experiment_is_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n[experiment]\nname = 'x'\nshare = {share}\nb.route = {{ master_rate = {rate} }}\n"

    def config(share: float, rate: float) -> Config:
        more = text.format(share=share, rate=rate)
        return gateway_config(tmp_path, "http://localhost:9/v1", more)

    gateway_server = build(config(1.0, 0.5), ENVIRONMENT)

    def variants() -> set[str]:
        experiment = gateway_server.gateway.experiment
        assert experiment is not None
        return {
            experiment.assign(Overrides(), Account("t", "team"), "", chat(str(number)))[0]
            for number in range(9)
        }

    assert variants() == {"x:b"}
    reload(gateway_server, lambda: config(0.0, 0.7))
    assert variants() == {"x:a"}
    # A router needs a restart, so the variant keeps the one that it has.
    assert caplog.records[-1].getMessage().endswith("need a restart: experiment.b")
    assert gateway_server.config.experiment.b.route == config(1.0, 0.5).experiment.b.route
    reload(gateway_server, lambda: config(0.0, 7.0))
    assert (
        "not reloaded: bottega.toml: experiment.b.route.master_rate must be at most" in caplog.text
    )
    assert variants() == {"x:a"}
    await gateway_server.aclose()


async def test_an_invalid_configuration_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1")
    gateway_server = build(config, ENVIRONMENT)

    def invalid() -> Config:
        raise SettingError("limits.images is out of range", hint="use 0 or more")

    limits = gateway_server.gateway.limits
    reload(gateway_server, invalid)
    assert "not reloaded: limits.images is out of range (use 0 or more)" in caplog.text
    assert (gateway_server.config, gateway_server.gateway.limits) == (config, limits)
    await gateway_server.aclose()


@pytest.mark.parametrize("is_valid", [True, False])
def test_open_streams_survive_a_reload_and_are_billed_once(
    endpoint: Server, tmp_path: Path, is_valid: bool
) -> None:
    may_end = threading.Event()
    pieces = [{"content": "a"}, {"content": "b"}]
    chunks: list[dict[str, Any]]
    chunks = [{"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in pieces]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    chunks.append({"choices": [], "usage": usage})

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(to_event(orjson.dumps(chunk)))
            if chunk is chunks[0]:
                await asyncio.to_thread(may_end.wait, 30)
        await response.write(DONE_EVENT)
        return response

    def read() -> Config:
        if not is_valid:
            raise SettingError("limits.images is out of range", hint="use 0 or more")
        return changed(config)

    config = gateway_config(tmp_path, endpoint.url)
    gateway_server = build(config, ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        endpoint.answers = [answer]
        client = openai.OpenAI(base_url=url, api_key="sk-any", max_retries=0)
        stream = client.chat.completions.create(
            model="bottega",
            messages=[{"role": "user", "content": "What is 3 + 4?"}],
            stream=True,
        )
        with client, stream:
            deltas = (chunk.choices[0].delta.content for chunk in stream if chunk.choices)
            assert next(deltas) == "a"
            reload(gateway_server, read)
            may_end.set()
            assert "".join(text or "" for text in deltas) == "b"
    with closing(Ledger(tmp_path / "gateway.db")) as ledger:
        [entry] = list_requests(ledger, EntryFilter(), 10)
        assert (entry.state, entry.prompt_tokens) == ("answered", 10)
    assert len([body for body in endpoint.bodies if body]) == 1, "others list the models"


def test_reloaded_names_are_settings() -> None:
    config = parse_config('[tiers.a]\nmodel = "openai:a"\n')
    for section, keys in RELOADED.items():
        for key in keys:
            assert hasattr(getattr(config, section), key)


async def test_without_a_file_sighup_drains() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    admission = Admission(app, 1)
    server = DrainingServer(uvicorn.Config(app), admission, 1.0)
    server._loop = asyncio.get_running_loop()
    server._on_sighup()
    await asyncio.sleep(0.01)
    assert admission.closing and server.should_exit and not server.force_exit
