from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.config.gateway_settings import TraceSettings
from bottega.gateway.request.request_traces import RequestTraces
from bottega.gateway.running.build import build
from bottega.recording import TraceStore
from bottega.types import Query
from tests.builders import solid_image
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.recording.test_traces import trace
from tests.server import Server, ok


@pytest.mark.parametrize("store", ["none", "texts", "images"])
def test_gateway_stores_traces_as_configured(endpoint: Server, tmp_path: Path, store: str) -> None:
    endpoint.answers = [ok("seven")]
    config = gateway_config(tmp_path, endpoint.url)
    config = dataclasses.replace(config, traces=TraceSettings(store))  # type: ignore[arg-type]
    with run_gateway(build(config, ENVIRONMENT)) as url:
        _, headers = ask(url, "What is 3 + 4?")
    file = tmp_path / "traces.db"
    assert file.exists() is (store != "none")
    if store != "none":
        with closing(TraceStore.open(file)) as traces:
            [found] = traces.search("3 + 4")
            assert found.id == headers["x-request-id"]
            assert (found.tier, found.answer.text) == ("large", "seven")
            assert traces.search("5 + 4") == []


@pytest.mark.parametrize("images", [True, False])
async def test_images_are_optional(tmp_path: Path, images: bool) -> None:
    store = TraceStore.open(tmp_path / "traces.db")
    traces = RequestTraces(store, images=images, keep_days=1e9)
    with closing(traces):
        await traces.recorder("team")(trace())
    with closing(TraceStore.open(tmp_path / "traces.db")) as stored:
        image = stored.image(solid_image(1).sha256)
        assert image == (solid_image(1) if images else None)
        assert [one.id for one in stored.search(namespace="team")] == ["abc123"]
        assert stored.search(namespace="") == []
        assert stored.namespace("abc123") == "team"


async def test_waiting_images_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(solid_image(1).data)
    monkeypatch.setattr("bottega.gateway.request.request_traces.MAX_PENDING_BYTES", size * 3 // 2)
    traces = RequestTraces(TraceStore.open(tmp_path / "t.db"), images=True, keep_days=1e9)
    with closing(traces):
        for shade in (1, 2):
            one = dataclasses.replace(trace(str(shade)), query=Query("?", (solid_image(shade),)))
            await traces.recorder("")(one)
    with closing(TraceStore.open(tmp_path / "t.db")) as stored:
        assert {one.id for one in stored.list()} == {"1", "2"}
        assert stored.image(solid_image(1).sha256) is not None
        assert stored.image(solid_image(2).sha256) is None


async def test_old_traces_are_deleted(tmp_path: Path) -> None:
    traces = RequestTraces(TraceStore.open(tmp_path / "t.db"), images=True, keep_days=1.0)
    with closing(traces):
        await traces.recorder("")(trace("old", moment=time.time() - 2 * 86_400))
        await traces.recorder("")(trace("new", moment=time.time()))
    with closing(TraceStore.open(tmp_path / "t.db")) as stored:
        assert [one.id for one in stored.search()] == ["new"]
        assert stored.summary().count == 1


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def truncate(file: Path) -> None:
    TraceStore.open(file).close()
    file.write_bytes(file.read_bytes()[:1000])


def break_schema(file: Path) -> None:
    TraceStore.open(file).close()
    with closing(sqlite3.connect(file)) as connection:
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE '%trace%'"
        for (name,) in connection.execute(tables).fetchall():
            connection.execute(f"DROP TABLE {name}")
        connection.commit()


def use_other_store(file: Path) -> None:
    Accounts(file).close()


@pytest.mark.parametrize("damage", [overwrite, truncate, break_schema, use_other_store, Path.mkdir])
def test_gateway_starts_without_damaged_traces(
    endpoint: Server,
    tmp_path: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(tmp_path / "traces.db")
    endpoint.answers = [ok("seven")]
    config = gateway_config(tmp_path, endpoint.url)
    config = dataclasses.replace(config, traces=TraceSettings("texts"))
    with run_gateway(build(config, ENVIRONMENT)) as url:
        reply, _ = ask(url, "What is 3 + 4?")
    assert reply["choices"][0]["message"]["content"] == "seven"
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    [message] = logged
    if damage is break_schema:  # found by the first write only
        assert message == "lost 1 record"
    else:
        assert message.startswith("traces are not stored") and "traces.db" in message
