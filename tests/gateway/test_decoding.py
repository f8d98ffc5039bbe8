from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import threading
import time
import urllib.error
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from bottega._util.caching import CLIENT
from bottega.gateway.request import reading
from bottega.gateway.request.reading import MB, SMALL, DecodeBudget, bytes_needed
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.image import Image
from bottega.knowledge import PixelEmbedder
from bottega.openai_api.errors import ApiError
from bottega.protocols import Vectors
from bottega.types import Query
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server


def png(side: int, mode: str = "1") -> Image:
    buffer = io.BytesIO()
    Pillow.new(mode, (side, side)).save(buffer, "PNG")
    return Image.from_bytes(buffer.getvalue())


@pytest.fixture(scope="module")
def large() -> Image:
    """Return a 6 KB image of 37 million pixels."""
    return png(6100)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> DecodeBudget:
    """Return a memory budget for one large image at a time."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return DecodeBudget(64 * MB, wait_seconds=5.0)


class BlockingWork:
    """Work that records its order and concurrency, and runs until it is released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.now = self.most = 0
        self.go = asyncio.Event()

    def named(self, name: str) -> Callable[[], Awaitable[str]]:
        async def work() -> str:
            self.began.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
            await self.go.wait()
            self.now -= 1
            return name

        return work


async def started(task: asyncio.Task[Any], work: BlockingWork, count: int) -> None:
    async with asyncio.timeout(5):
        while len(work.began) < count:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.001)
    assert not task.done()


def start_work(client: str, work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    token = CLIENT.set(client)
    try:
        return asyncio.create_task(work)
    finally:
        CLIENT.reset(token)


def waiting(budget: DecodeBudget) -> int:
    return sum(map(len, list(budget._large.waiting.values())))


async def queued(budget: DecodeBudget, count: int) -> None:
    async with asyncio.timeout(5):
        while waiting(budget) < count:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *(("JPEG2000", "I;16"), ("TIFF", "F"), ("PNG", "I;16"), ("AVIF", "RGBA")),
        *(("JPEG", "CMYK"), ("JPEG", "RGB"), ("MPO", "RGB")),
    ],
)
def test_no_codec_needs_more_than_the_bound(format: str, mode: str) -> None:
    if format not in Pillow.SAVE:
        pytest.skip(f"Pillow was built without {format}")
    options = {"progressive": True} if format in ("JPEG", "MPO") else {}
    buffer = io.BytesIO()
    Pillow.new(mode, (100, 80)).save(buffer, format, **options)
    image = Image.from_bytes(buffer.getvalue())
    for cost in (reading.embedding_cost, Image.wire_cost, Image.strips_cost):
        assert bytes_needed([image], cost) <= reading.max_bytes_needed([image])


async def test_clients_take_turns_and_small_images_do_not_wait(
    budget: DecodeBudget, large: Image
) -> None:
    work, tasks = BlockingWork(), []
    for n, name in enumerate(["a1", "a2", "a3", "b1", "b2"]):
        tasks.append(start_work(name[0], budget.run([large], work.named(name))))
        await (started(tasks[0], work, 1) if n == 0 else queued(budget, n))
    quick = BlockingWork()
    quick.go.set()
    assert await budget.run([png(32)], quick.named("small")) == "small"
    assert await budget.run([], quick.named("text")) == "text"
    work.go.set()
    assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "b1", "b2"]
    assert work.began == ["a1", "a2", "b1", "a3", "b2"]
    assert work.most == 1


async def test_waiting_too_long_gets_429(budget: DecodeBudget, large: Image) -> None:
    work = BlockingWork()
    first = asyncio.create_task(budget.run([large], work.named("first")))
    await started(first, work, 1)
    budget.wait_seconds = 0.01
    with pytest.raises(ApiError) as http_error_of:
        await budget.run([large], work.named("second"))
    assert (http_error_of.value.status, http_error_of.value.code) == (429, "decoding_busy")
    assert "retry-after" in http_error_of.value.headers
    work.go.set()
    assert await first == "first"
    assert await budget.run([large], work.named("third")) == "third"


async def test_memory_is_held_until_the_work_ends(budget: DecodeBudget, large: Image) -> None:
    """A disconnect stops no thread, so it must not free memory for the next request."""
    work = BlockingWork()
    first = asyncio.create_task(budget.run([large], work.named("first")))
    await started(first, work, 1)
    first.cancel()
    second = asyncio.create_task(budget.run([large], work.named("second")))
    await queued(budget, 1)
    leaving = asyncio.create_task(budget.run([large], work.named("leaving")))
    await queued(budget, 2)
    leaving.cancel()
    await asyncio.gather(first, leaving, return_exceptions=True)
    assert work.began == ["first"]
    work.go.set()
    assert await second == "second"
    assert work.began == ["first", "second"]


async def test_failure_releases_its_memory(budget: DecodeBudget, large: Image) -> None:
    async def fails() -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await budget.run([large], fails)


async def test_images_beyond_the_whole_budget_are_413(large: Image) -> None:
    with pytest.raises(ApiError) as http_error_of:
        await DecodeBudget(16 * MB).check([large])
    assert (http_error_of.value.status, http_error_of.value.code) == (413, "images_too_large")
    await DecodeBudget(64 * MB).check([large])


def test_estimate_depends_on_the_decoded_size() -> None:
    buffer = io.BytesIO()
    Pillow.new("L", (4096, 4096)).save(buffer, "JPEG")
    image = Image.from_bytes(buffer.getvalue())
    whole, wire = 4096**2, 2048**2
    assert bytes_needed([image]) < wire
    assert bytes_needed([image], Image.wire_cost) >= 4 * wire
    assert bytes_needed([image], Image.strips_cost) >= 4 * whole


async def test_work_at_full_size_waits_for_its_memory(budget: DecodeBudget) -> None:
    buffer = io.BytesIO()
    Pillow.new("L", (3000, 3000)).save(buffer, "JPEG")
    image, work = Image.from_bytes(buffer.getvalue()), BlockingWork()
    first = asyncio.create_task(budget.run([image], work.named("first"), Image.strips_cost))
    await started(first, work, 1)
    second = asyncio.create_task(budget.run([image], work.named("second"), Image.strips_cost))
    await queued(budget, 1)
    assert work.began == ["first"]
    work.go.set()
    assert [await first, await second] == ["first", "second"]


def test_the_estimate_is_one_raster_and_the_reduced_results(large: Image) -> None:
    assert 37 * 10**6 < bytes_needed([large]) < 45 * 10**6
    assert bytes_needed([large] * 5) < bytes_needed([large]) + 5 * 3 * 10**6
    assert bytes_needed([]) == 0
    assert bytes_needed([png(64, "RGB")]) < SMALL


def question(image: Image) -> Any:
    part = {"type": "image_url", "image_url": {"url": image.data_url}}
    return [part, {"type": "text", "text": "What is it?"}]


def http_error_of(work: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        work()
    with caught.value as error:
        return error.code, json.load(error)["error"]["code"]


class BlockingEmbedder:
    """Embedder that blocks, as a large image would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self.go = threading.Event()
        self.lock = threading.Lock()
        plain = PixelEmbedder.embed

        def embed(embedder: PixelEmbedder, queries: Sequence[Query]) -> Vectors:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.go.wait(10)
            with self.lock:
                self.now -= 1
            return plain(embedder, queries)

        monkeypatch.setattr(PixelEmbedder, "embed", embed)


def gateway_server(endpoint: Server, folder: Path) -> GatewayServer:
    config = gateway_config(folder, endpoint.url)
    config = dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, embed="pixels"),
        route=dataclasses.replace(config.route, cold_start=0),
    )
    return build(config, ENVIRONMENT)


def test_gateway_embeds_large_images_sequentially(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for retrieval, and again when the answer is stored."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(reading, "SMALL", 0)
    gateway = gateway_server(endpoint, tmp_path)
    with run_gateway(gateway) as url, ThreadPoolExecutor(4) as clients:
        ask(url, question(png(20)), model="bottega/large")
        embedding = BlockingEmbedder(monkeypatch)
        sent: list[Future[Any]] = [
            clients.submit(ask, url, question(png(21 + n)), model=model)
            for n, model in enumerate(["bottega/small", "bottega/large"] * 2)
        ]
        budget = gateway.gateway.decoding
        end = time.monotonic() + 10
        while waiting(budget) < 3:
            assert time.monotonic() < end
            time.sleep(0.005)
        budget.wait_seconds = 0.02
        late = question(png(30))
        assert http_error_of(lambda: ask(url, late, model="bottega/small")) == (
            429,
            "decoding_busy",
        )
        budget.wait_seconds = 10.0
        embedding.go.set()
        for one in sent:
            one.result(20)
    assert embedding.most == 1


def test_gateway_rejects_images_above_the_pixel_limit(endpoint: Server, tmp_path: Path) -> None:
    bomb = base64.b64encode(png(6100).data).decode()
    part: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bomb}"}}
    other = base64.b64encode(png(6101).data).decode()
    parts: Any = [
        part,
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}},
    ]
    gateway = gateway_server(endpoint, tmp_path)
    with run_gateway(gateway) as url:
        assert http_error_of(lambda: ask(url, parts)) == (400, "limit_exceeded")
        gateway.gateway.decoding.max_bytes = 16 * MB
        assert http_error_of(lambda: ask(url, parts[:1])) == (413, "images_too_large")
    assert [body for body in endpoint.bodies if body] == []
