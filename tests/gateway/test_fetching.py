from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver
from PIL import Image as Pillow

from bottega.gateway.fetching.fetcher import Fetcher
from bottega.gateway.refusals import Refusal
from bottega.image import Image

PIXEL = Image.from_pillow(Pillow.new("RGB", (8, 6), "red"))
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"  # loopback plays both, by an injected policy


@dataclass
class World:
    """A server that plays the public internet, and one on the same port that must never be
    reached, on every loopback address that there is."""

    port: int
    answer: Answer
    names: dict[str, list[list[str]]]
    requests: list[web.Request] = field(default_factory=list)
    intrusions: int = 0
    resolved: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The next answer of the table; of numbers what the C library makes of them."""
        self.resolved.append(host)
        if answers := self.names.get(host):
            return answers.pop(0) if len(answers) > 1 else answers[0]
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        return [str(address[0]) for *_, address in found]

    def fetcher(self, **settings: Any) -> Fetcher:
        defaults: dict[str, Any] = {
            "enabled": True,
            "ports": [self.port],
            "allowed": lambda address: address == OUTSIDE,
            "resolve": self.resolve,
        }
        return Fetcher(**defaults | settings)

    def url(self, host: str = "pictures.example", path: str = "/cat.png") -> str:
        return f"http://{host}:{self.port}{path}"

    async def refused(self, url: str, **settings: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await self.fetcher(**settings).fetch(url, "messages[0].content[1].image_url.url")
        refusal = caught.value
        assert (refusal.status, refusal.code) == (400, "invalid_image_url")
        assert refusal.param == "messages[0].content[1].image_url.url" and refusal.hint
        assert self.intrusions == 0
        return refusal


def shows(body: bytes = PIXEL.data, kind: str = "image/png", **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, headers={"Content-Type": kind} | named)

    return answer


def redirects(*places: str, status: int = 302) -> Answer:
    left = list(places)

    async def answer(request: web.Request) -> web.StreamResponse:
        if not left:
            return await shows()(request)
        return web.Response(status=status, headers={"Location": left.pop(0)})

    return answer


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async def handle(request: web.Request) -> web.StreamResponse:
        here.requests.append(request)
        return await here.answer(request)

    async def intruded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.intrusions += 1
        writer.close()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, 0).start()
    port = runner.addresses[0][1]
    inside = [INSIDE, "::1"] if socket.has_ipv6 and _has_loopback_v6() else [INSIDE]
    servers = [await asyncio.start_server(intruded, host, port) for host in inside]
    names = {"pictures.example": [[OUTSIDE]], "inner.example": [[INSIDE]]}
    here = World(port, shows(), names)
    yield here
    for server in servers:
        server.close()
    await runner.cleanup()


def _has_loopback_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_an_image_is_fetched_by_name_and_by_address(world: World) -> None:
    assert await world.fetcher().fetch(world.url()) == PIXEL
    assert await world.fetcher().fetch(world.url(OUTSIDE)) == PIXEL
    assert await world.fetcher().fetch(world.url("PICTURES.example")) == PIXEL
    assert world.resolved == ["pictures.example", "pictures.example"]


async def test_nothing_is_fetched_unless_it_is_enabled(world: World) -> None:
    refusal = await world.refused(world.url(), enabled=False)
    assert "not fetched from URLs" in str(refusal)
    assert Fetcher().enabled is False and not world.requests and not world.resolved


async def test_the_forbidden_server_is_there(world: World) -> None:
    """Without the policy it is reached: the other tests would see it."""
    for host in (INSIDE, "inner.example"):
        with pytest.raises(Refusal):
            await world.fetcher(allowed=lambda address: True).fetch(world.url(host))
    assert world.intrusions >= 2


FORMS = [
    "127.0.0.2",
    "127.2",
    "127.0.2",
    "2130706434",
    "0x7f000002",
    "0x7f.2",
    "0X7F.0.0.2",
    "017700000002",
    "0177.0.0.2",
    "0177.0.0.02",
    "127.0.0.2.",
    "127.0.0.2..",
    "00000127.0.0.2",
    "127.000.000.002",
    "0.0.0.0",
    "0",
    "[::1]",
    "[::]",
    "[0:0:0:0:0:0:0:1]",
    "[0000::0001]",
    "[::ffff:127.0.0.2]",
    "[::FFFF:7f00:2]",
    "[0:0:0:0:0:ffff:127.0.0.2]",
    "[::127.0.0.2]",
    "[::ffff:0:127.0.0.2]",
    "[64:ff9b::127.0.0.2]",
    "[2002:7f00:2::]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffd]",
    "[::1%25lo]",
    "[fe80::1%25eth0]",
    "１２７.０.０.２",
    "①②⑦.⓪.⓪.②",
    "127。0。0。2",
    "%31%32%37.0.0.2",
    "127.0.0.%32",
    "%6c%6f%63%61%6c%68%6f%73%74",
    "good.example@127.0.0.2",
    "good.example:80@127.0.0.2",
    "good.example%00@127.0.0.2",
    "127.0.0.2%00.good.example",
    "127.0.0.2%0d%0a",
    "a@b@127.0.0.2",
    "good.example\\@127.0.0.2",
    "127.0.0.2\\@good.example",
    "good.example\t@127.0.0.2",
    "\t127.0.0.2",
    " 127.0.0.2",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ",
    "a.localhost",
    "localhost.localdomain",
    "ip6-localhost",
    "127.0.0.2.nip.io",
    "inner.example",
    "INNER.example",
    "inner.example.",
    "mixed.example",
    "metadata.google.internal",
    "169.254.169.254",
    "100.100.100.200",
    "[fd00:ec2::254]",
    "10.0.0.1",
    "192.168.0.1",
    "172.16.0.1",
    "255.255.255.255",
    "224.0.0.1",
    "unknown.example",
    "",
    "-",
    ".",
    "[",
    "[127.0.0.2]",
    "[v1.a]",
]
NAMES = {
    "localhost": [[INSIDE, "::1"]],
    "localhost.": [[INSIDE]],
    "a.localhost": [[INSIDE]],
    "localhost.localdomain": [[INSIDE]],
    "ip6-localhost": [["::1"]],
    "127.0.0.2.nip.io": [[INSIDE]],
    "inner.example.": [[INSIDE]],
    "mixed.example": [[OUTSIDE, INSIDE]],
    "metadata.google.internal": [["169.254.169.254"]],
    "a": [[INSIDE]],
    "good.example": [[INSIDE]],
    "v1.a": [[INSIDE]],
}


@pytest.mark.parametrize("form", FORMS)
async def test_no_way_of_writing_it_leads_inside(world: World, form: str) -> None:
    world.names |= NAMES
    await world.refused(f"http://{form}:{world.port}/cat.png")
    assert not world.requests


@pytest.mark.parametrize("form", FORMS)
async def test_no_way_of_writing_it_leads_inside_after_a_redirect(world: World, form: str) -> None:
    world.names |= NAMES
    world.answer = redirects(f"http://{form}:{world.port}/cat.png")
    await world.refused(world.url())
    assert len(world.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file://127.0.0.2/etc/passwd",
        "gopher://127.0.0.2:{port}/_GET",
        "ftp://127.0.0.2:{port}/a.png",
        "dict://127.0.0.2:{port}/a",
        "ws://pictures.example:{port}/",
        "unix:///var/run/docker.sock",
        "http+unix://%2Fvar%2Frun%2Fdocker.sock/",
        "data:image/png;base64,iVBORw0KGgo=",
        "javascript:alert(1)",
        "HTTP:127.0.0.2:{port}",
        "http:/127.0.0.2:{port}/",
        "http:///127.0.0.2:{port}/",
        "http:\\\\127.0.0.2:{port}\\",
        "///127.0.0.2:{port}/",
        "http://127.0.0.2:{port}#@pictures.example/",
        "http://127.0.0.2:{port}?@pictures.example/",
        "http://127.0.0.2:{port};@pictures.example/",
        "http://pictures.example:{port}@127.0.0.2:{port}/",
        "http://pictures.example:{port}:80/",
        "http://pictures.example:99999/",
        "http://pictures.example:22/",
        "http://pictures.example/",
        "http://user:password@pictures.example:{port}/",
        "http://user@pictures.example:{port}/",
        "http://@127.0.0.2:{port}/",
        "",
        "http://" + "a" * 9000,
        "http://\ud800.example/",
        "http://" + "a" * 70 + ".example:{port}/",
    ],
)
async def test_no_other_scheme_port_or_user(world: World, url: str) -> None:
    await world.refused(url.replace("{port}", str(world.port)))
    assert not world.requests


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:{port}/",
        "//127.0.0.2:{port}/",
        "//inner.example:{port}/",
        "http://[::1]:{port}/",
        "file:///etc/passwd",
        "gopher://127.0.0.2:{port}/",
        "ftp://127.0.0.2:{port}/",
        "data:image/png;base64,iVBORw0KGgo=",
        "http://user:password@pictures.example:{port}/",
        "//good@127.0.0.2:{port}/",
        "\\\\127.0.0.2:{port}/",
        "/\\127.0.0.2:{port}/",
        "http://pictures.example:22/",
        "http://[",
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_each_redirect_is_checked(world: World, location: str, status: int) -> None:
    world.answer = redirects(location.replace("{port}", str(world.port)), status=status)
    await world.refused(world.url())
    assert len(world.requests) == 1


async def test_three_redirects_are_followed_and_no_more(world: World) -> None:
    world.answer = redirects("/a", "b?c=d", world.url(path="/e"))
    assert await world.fetcher().fetch(world.url()) == PIXEL
    assert [request.path_qs for request in world.requests] == ["/cat.png", "/a", "/b?c=d", "/e"]
    world.requests.clear()
    world.answer = redirects(*["/loop"] * 100)
    assert "more than 3 times" in str(await world.refused(world.url()))
    assert len(world.requests) == 4


async def test_a_name_that_changes_its_mind_is_pinned(world: World) -> None:
    world.names["rebinding.example"] = [[OUTSIDE], [INSIDE]]
    assert await world.fetcher().fetch(world.url("rebinding.example")) == PIXEL
    assert world.resolved == ["rebinding.example"] and world.intrusions == 0
    await world.refused(world.url("rebinding.example"))


async def test_a_redirect_to_the_same_name_is_resolved_and_checked_anew(world: World) -> None:
    world.names["rebinding.example"] = [[OUTSIDE], [INSIDE]]
    world.answer = redirects("/again")
    await world.refused(world.url("rebinding.example"))
    assert len(world.requests) == 1 and len(world.resolved) == 2


@pytest.mark.parametrize("answer", [[OUTSIDE, INSIDE], [INSIDE, OUTSIDE], [OUTSIDE, "::1"]])
async def test_one_bad_address_among_good_ones_is_enough(world: World, answer: list[str]) -> None:
    world.names["mixed.example"] = [answer]
    await world.refused(world.url("mixed.example"))
    assert not world.requests


async def test_what_is_inside_and_what_is_unknown_sound_alike(world: World) -> None:
    inside = await world.refused(world.url("inner.example"))
    assert str(inside) == str(await world.refused(world.url("unknown.example")))
    assert INSIDE not in str(inside)


@pytest.mark.parametrize("form", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "127.0.0.1."])
async def test_an_address_is_written_in_one_way_only(world: World, form: str) -> None:
    """Even one that is allowed: what connects might read it otherwise than what checked it."""
    assert "malformed" in str(await world.refused(world.url(form)))
    assert not world.requests and not world.resolved


async def test_hosts_may_be_listed(world: World) -> None:
    world.names |= {name: [[OUTSIDE]] for name in ("a.cdn.example", "cdn.example", "xcdn.example")}
    hosts = ["pictures.example", ".cdn.example"]
    for host in ("pictures.example", "a.cdn.example"):
        assert await world.fetcher(hosts=hosts).fetch(world.url(host)) == PIXEL
    for host in ("cdn.example", "xcdn.example", "a.pictures.example", OUTSIDE):
        await world.refused(world.url(host), hosts=hosts)
    world.answer = redirects(world.url("xcdn.example"))
    await world.refused(world.url(), hosts=hosts)
    await world.refused(world.url(), hosts=[])


SENT = {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}


async def test_nothing_of_this_machine_travels_along(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine pictures.example login ada password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{INSIDE}:{world.port}")
    world.answer = redirects("/again")
    fetcher = world.fetcher()
    await fetcher.fetch(world.url())
    world.answer = shows(Set_Cookie="a=b; Path=/")
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
    ("answer", "said"),
    [
        (endless, "larger than"),
        (shows(bytes(200_000)), "larger than"),
        (silent, "within"),
        (trickle, "within"),
        (shows(b"<b>hello</b>", "text/html"), "something else"),
        (shows(PIXEL.data, "application/octet-stream"), "something else"),
        (shows(b"<svg/>", "image/svg+xml"), "not an image"),
        (shows(b"", "image/png"), "empty"),
        (shows(PIXEL.data, "image/png", Content_Encoding="br"), "compressed"),
        (shows(gzip.compress(bytes(10**7)), "image/png", Content_Encoding="gzip"), "compressed"),
        (redirects(status=302), None),
    ],
)
async def test_what_a_server_may_not_send(world: World, answer: Answer, said: str | None) -> None:
    world.answer = answer
    if said is None:
        assert await world.fetcher().fetch(world.url()) == PIXEL
    else:
        assert said in str(await world.refused(world.url(), max_bytes=100_000, seconds=0.5))


@pytest.mark.parametrize("status", [204, 206, 300, 304, 401, 404, 500])
async def test_only_200_is_an_image(world: World, status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, content_type="image/png")

    world.answer = answer
    assert str(status) in str(await world.refused(world.url()))


async def test_a_name_server_that_is_silent_has_its_time_too(world: World) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(30)
        return []

    assert "within" in str(await world.refused(world.url(), resolve=never, seconds=0.2))


async def test_a_host_that_does_not_listen_is_a_refusal(world: World) -> None:
    with socket.socket() as unused:
        unused.bind((OUTSIDE, 0))
        port = unused.getsockname()[1]
        refusal = await world.refused(f"http://pictures.example:{port}/", ports=[port])
    assert str(refusal) == "The image was not fetched: its server failed."


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    file = tmp_path / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += f" -keyout {file} -out {file}.crt -subj /CN=pictures.example"
    command += " -addext subjectAltName=DNS:pictures.example"
    subprocess.run(command.split(), check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


async def test_tls_is_verified_by_the_name_though_the_address_is_pinned(
    world: World, certificate: Path
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await shows()(request)

    trusting = ssl.create_default_context(cafile=str(certificate))
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)

    def trusted(resolver: AbstractResolver) -> aiohttp.BaseConnector:
        return aiohttp.TCPConnector(resolver=resolver, ssl=trusting, force_close=True)

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, 0, ssl_context=serving).start()
    port = runner.addresses[0][1]
    world.names["other.example"] = [[OUTSIDE]]
    try:
        fetcher = world.fetcher(ports=[port], connect=trusted)
        assert await fetcher.fetch(f"https://pictures.example:{port}/") == PIXEL
        for host in ("other.example", OUTSIDE):
            await world.refused(f"https://{host}:{port}/", ports=[port], connect=trusted)
        await world.refused(f"https://pictures.example:{port}/", ports=[port])  # not trusted
    finally:
        await runner.cleanup()
