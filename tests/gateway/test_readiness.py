"""`/readyz` while one tier fails and another one answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import ServerFailedError
from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok, reply

FINE = {"status": "ready", "paused": [], "misconfigured": []}


def readiness(url: str) -> Any:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/readyz", timeout=20) as response:
        return json.load(response)


def test_readyz_lists_paused_tiers(endpoint: Server, tmp_path: Path) -> None:
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    endpoint.answers = [ok("seven")]
    with run_gateway(gateway_server) as url:
        assert readiness(url) == FINE
        for _ in range(5):
            with (
                pytest.raises(ServerFailedError),
                gateway_server.tier_set.endpoints["large"].breaker.attempt(),
            ):
                raise ServerFailedError("down", status=500)
        assert readiness(url) == {**FINE, "paused": ["large"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 403])
def test_readyz_lists_misconfigured_tiers_until_they_answer(
    endpoint: Server, tmp_path: Path, status: int, stream: bool
) -> None:
    refused, well = reply({"error": {"message": "no"}}, status=status), ok("seven")
    with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)) as url:
        endpoint.bodies.clear()
        endpoint.answers = [refused, well, reply({"error": {"message": "?"}}, status=400), well]
        assert _status(url, "one", stream) == 502
        assert readiness(url) == {**FINE, "misconfigured": ["large"]}
        ask(url, "two", model="bottega/small")
        assert readiness(url) == {**FINE, "misconfigured": ["large"]}
        assert _status(url, "three", stream) == 400  # a client error is no evidence about the key
        assert readiness(url) == {**FINE, "misconfigured": ["large"]}
        assert _status(url, "four", stream) == 200
        assert readiness(url) == FINE


def test_tiers_that_stay_down_are_logged_once_a_minute(
    endpoint: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("bottega.gateway.running.server.RETRY_SECONDS", 0.001)
    endpoint.answers = [reply({"error": {"message": "down"}}, status=503)]
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)

    def checks() -> int:
        return len(endpoint.paths)

    def logged() -> list[str]:
        found = [one.getMessage() for one in caplog.records if "not ready" in one.message]
        return sorted(one.split(" is ")[0] for one in found)

    with run_gateway(gateway_server, ready=False):
        _wait(lambda: checks() > 20)
        assert logged() == ["large", "small"]
        monkeypatch.setattr("bottega._util.batch_writer.LOG_SECONDS", 0.0)
        before = checks()
        _wait(lambda: checks() > before + 20)
        assert len(logged()) > 10
        endpoint.answers = [ok("seven")]
        _wait(lambda: gateway_server.is_ready)


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def _status(url: str, text: str, stream: bool) -> int:
    try:
        body = {"model": "bottega/large", "stream": stream}
        body["messages"] = [{"role": "user", "content": text}]
        asking = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asking, timeout=20) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
