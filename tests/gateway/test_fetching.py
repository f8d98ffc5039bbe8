"""Image fetching for clients, and its restrictions on image servers."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from bottega.gateway.config.gateway_settings import LimitSettings
from bottega.gateway.running.build import build_fetch
from bottega.openai_api.errors import ApiError
from tests.gateway.image_servers import (
    INSIDE,
    OUTSIDE,
    PIXEL,
    Answer,
    World,
    image_answer,
    redirects,
)


async def test_an_image_is_fetched_by_name_and_by_address(world: World) -> None:
    assert await world.fetcher().fetch(world.url()) == PIXEL
    assert await world.fetcher().fetch(world.url(OUTSIDE)) == PIXEL
    assert await world.fetcher().fetch(world.url("IMAGES.example")) == PIXEL
    assert world.resolved == ["images.example", "images.example"]


def test_fetching_is_disabled_by_default() -> None:
    assert build_fetch(LimitSettings()) is None
    assert build_fetch(LimitSettings(fetch_images=True)) is not None


async def test_forbidden_server_is_reachable_directly(world: World) -> None:
    """Without the policy it is reachable, so the other tests would notice."""
    for host in (INSIDE, "inner.example"):
        with pytest.raises(ApiError):
            await world.fetcher(allowed=lambda address: True).fetch(world.url(host))
    assert world.intrusions >= 2


async def test_at_most_three_redirects_are_followed(world: World) -> None:
    world.answer = redirects("/a", "b?c=d", world.url(path="/e"))
    assert await world.fetcher().fetch(world.url()) == PIXEL
    assert [request.path_qs for request in world.requests] == ["/cat.png", "/a", "/b?c=d", "/e"]
    world.requests.clear()
    world.answer = redirects(*["/loop"] * 100)
    assert "more than 3 times" in str(await world.rejected(world.url()))
    assert len(world.requests) == 4


async def test_only_listed_hosts_are_fetched(world: World) -> None:
    world.names |= {name: [[OUTSIDE]] for name in ("a.cdn.example", "cdn.example", "xcdn.example")}
    hosts = ["images.example", ".cdn.example"]
    for host in ("images.example", "a.cdn.example"):
        assert await world.fetcher(hosts=hosts).fetch(world.url(host)) == PIXEL
    for host in ("cdn.example", "xcdn.example", "a.images.example", OUTSIDE):
        await world.rejected(world.url(host), hosts=hosts)
    world.answer = redirects(world.url("xcdn.example"))
    await world.rejected(world.url(), hosts=hosts)
    await world.rejected(world.url(), hosts=[])


SENT = {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}


async def test_requests_contain_no_local_data(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine images.example login ada password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{INSIDE}:{world.port}")
    world.answer = redirects("/again")
    fetcher = world.fetcher()
    await fetcher.fetch(world.url())
    world.answer = image_answer(Set_Cookie="a=b; Path=/")
    await fetcher.fetch(world.url())
    await fetcher.fetch(world.url())
    assert world.intrusions == 0
    for request in world.requests:
        assert set(request.headers) <= SENT and request.headers["User-Agent"] == "bottega"


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "image/png"})
    await response.prepare(request)
    try:
        while True:
            await response.write(bytes(65536))
    except ConnectionError:
        return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def trickle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "image/png"})
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"x")
        await asyncio.sleep(0.02)
    return response


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (endless, "larger than"),
        (image_answer(bytes(200_000)), "larger than"),
        (silent, "within"),
        (trickle, "within"),
        (image_answer(b"<b>hello</b>", "text/html"), "did not send an image"),
        (image_answer(PIXEL.data, "application/octet-stream"), "did not send an image"),
        (image_answer(b"<svg/>", "image/svg+xml"), "not a readable image"),
        (image_answer(b"", "image/png"), "empty"),
        (image_answer(PIXEL.data, "image/png", Content_Encoding="br"), "compressed"),
        (
            image_answer(gzip.compress(bytes(10**7)), "image/png", Content_Encoding="gzip"),
            "compressed",
        ),
        (redirects(status=302), None),
    ],
)
async def test_invalid_server_replies_are_rejected(
    world: World, answer: Answer, message: str | None
) -> None:
    world.answer = answer
    if message is None:
        assert await world.fetcher().fetch(world.url()) == PIXEL
    else:
        assert message in str(await world.rejected(world.url(), max_bytes=100_000, seconds=0.5))


async def test_no_more_than_the_allowed_number_of_fetches_run_at_once(world: World) -> None:
    open_now, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        open_now -= 1
        return await image_answer()(request)

    world.answer = answer
    fetcher = world.fetcher(concurrency=2)
    found = await asyncio.gather(*(fetcher.fetch(world.url()) for _ in range(5)))
    assert (found, most) == ([PIXEL] * 5, 2)


async def test_waiting_for_a_slot_counts_towards_the_timeout(world: World) -> None:
    world.answer = silent
    fetcher = world.fetcher(concurrency=1, seconds=0.2)
    async with fetcher._slots.hold():  # like a fetch that does not end
        with pytest.raises(ApiError, match=r"within 0\.2 s\."):
            await asyncio.wait_for(fetcher.fetch(world.url()), 5)
    assert not world.requests


@pytest.mark.parametrize("status", [204, 206, 300, 304, 401, 404, 500])
async def test_only_200_is_an_image(world: World, status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, content_type="image/png")

    world.answer = answer
    assert str(status) in str(await world.rejected(world.url()))


async def test_silent_name_server_times_out(world: World) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(30)
        return []

    assert "within" in str(await world.rejected(world.url(), resolve=never, seconds=0.2))


async def test_unreachable_host_is_an_error(world: World) -> None:
    with socket.socket() as unused:
        unused.bind((OUTSIDE, 0))
        port = unused.getsockname()[1]
        error = await world.rejected(f"http://images.example:{port}/", ports=[port])
    assert str(error) == "The image was not fetched: its server failed."


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    file = tmp_path / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += f" -keyout {file} -out {file}.crt -subj /CN=images.example"
    command += " -addext subjectAltName=DNS:images.example"
    subprocess.run(command.split(), check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


async def test_tls_is_verified_by_name_with_a_pinned_address(
    world: World, certificate: Path
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await image_answer()(request)

    trusting = ssl.create_default_context(cafile=str(certificate))
    run_gateway = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    run_gateway.load_cert_chain(certificate)

    def trusted(resolver: AbstractResolver) -> aiohttp.BaseConnector:
        return aiohttp.TCPConnector(resolver=resolver, ssl=trusting, force_close=True)

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, 0, ssl_context=run_gateway).start()
    port = runner.addresses[0][1]
    world.names["other.example"] = [[OUTSIDE]]
    try:
        fetcher = world.fetcher(ports=[port], connect=trusted)
        assert await fetcher.fetch(f"https://images.example:{port}/") == PIXEL
        for host in ("other.example", OUTSIDE):
            await world.rejected(f"https://{host}:{port}/", ports=[port], connect=trusted)
        await world.rejected(f"https://images.example:{port}/", ports=[port])  # not trusted
    finally:
        await runner.cleanup()
