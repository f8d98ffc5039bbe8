from __future__ import annotations

import dataclasses
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bottega.cli import console as module
from bottega.cli.console import Console
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.config.gateway_settings import Config, ConsoleSettings
from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def served(config: Config, path: str) -> tuple[int, str]:
    console = Console.of(config)
    server = build(config, ENVIRONMENT, more_routes=console.routes)
    with run_gateway(server) as url:
        ask(url, "What is 3 + 4?")
        return fetch(url.removesuffix("/v1") + path)


def test_a_gateway_without_the_extra_says_how_to_get_it(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answers = [ok("seven")]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    config = gateway_config(tmp_path, endpoint.url)
    assert Console.of(config).link("http://127.0.0.1:8000/v1", protected=False) is None
    for path in ("/ui", "/ui/requests"):
        status, text = served(config, path)
        assert status == 501
        assert "itsdangerous" in text and "pip install 'bottega-vlm[ui]'" in text


def test_a_disabled_console_has_no_pages(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("seven")]
    config = gateway_config(tmp_path, endpoint.url)
    config = dataclasses.replace(config, console=ConsoleSettings(enabled=False))
    assert Console.of(config).link("http://127.0.0.1:8000/v1", protected=False) is None
    assert served(config, "/ui")[0] == 404


def test_the_printed_link_opens_a_gateway_without_keys(endpoint: Server, tmp_path: Path) -> None:
    config = gateway_config(tmp_path, endpoint.url)
    console = Console.of(config)
    server = build(config, ENVIRONMENT, more_routes=console.routes)
    with run_gateway(server) as url:
        link = console.link(url, protected=False)
        assert link is not None
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(link, timeout=20) as reply:
            assert reply.url == url.removesuffix("/v1") + "/ui/overview"


def test_keys_are_the_only_way_into_a_gateway_that_has_some(
    endpoint: Server, tmp_path: Path
) -> None:
    accounts = Accounts(tmp_path / FILE)
    accounts.add("boss", admin=True)
    accounts.close()
    config = gateway_config(tmp_path, endpoint.url)
    console = Console.of(config)
    server = build(config, ENVIRONMENT, more_routes=console.routes)
    with run_gateway(server) as url:
        assert console.link(url, protected=True) == url.removesuffix("/v1") + "/ui/login"
        page = f"{url.removesuffix('/v1')}/ui/login?token={console.token}"
        assert fetch(page)[0] == 401
