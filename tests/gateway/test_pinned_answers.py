"""Pinned answers survive later answers of the master."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok


@pytest.fixture
def key(tmp_path: Path) -> Iterator[str]:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        yield accounts.add("operator", admin=True)[1]


def admin(url: str, key: str, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(
        f"{url.removesuffix('/v1')}/admin/{path}",
        method=method,
        headers={"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)


def warned(gateway_server: GatewayServer) -> list[str]:
    lines = gateway_server.metrics.exposition().decode().splitlines()
    return [line for line in lines if line.startswith("bottega_warnings_total{")]


def test_pinned_answer_is_not_replaced_by_the_master(
    endpoint: Server, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = gateway_config(tmp_path, endpoint.url)
    gateway_server = build(config, ENVIRONMENT)
    endpoint.answers = [ok("seven"), ok("eight"), ok("nine")]
    master = "bottega:route=large,no-replay"
    with run_gateway(gateway_server) as url:
        endpoint.bodies.clear()
        _, first = ask(url, "What is 3 + 4?", key=key, model=master)
        id = first["x-bottega-stored"]
        assert admin(url, key, f"cache/{id}/pin", "POST") == {"changed": 1, "pinned": 1}
        reply, second = ask(url, "What is 3 + 4?", key=key, model=master)
        held = admin(url, key, f"cache/{id}")
        page = admin(url, key, "cache")
        warnings, logged = warned(gateway_server), caplog.text
        admin(url, key, f"cache/{id}/unpin", "POST")
        _, third = ask(url, "What is 3 + 4?", key=key, model=master)
    assert reply["choices"][0]["message"]["content"] == "eight"
    assert "x-bottega-stored" not in second
    assert (held["answer"], held["pinned"]) == ("seven", True)
    assert page["total"] == 1
    assert warnings == []
    assert "not stored" not in logged
    assert third["x-bottega-stored"] != id
