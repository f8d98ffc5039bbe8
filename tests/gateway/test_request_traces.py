from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path

import pytest

from bottega.gateway.config.settings import TraceSettings
from bottega.gateway.request_traces import RequestTraces
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
    monkeypatch.setattr("bottega.gateway.request_traces.MAX_PENDING_BYTES", size * 3 // 2)
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
