"""Frames and host names: rules of every response of the console, errors included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bottega.ui.standalone import standalone_app
from tests.gateway.harness import running
from tests.server import Server
from tests.ui.conftest import TOKEN, Console, console
from tests.ui.test_pages import ADMIN
from tests.ui.test_sessions import SAME, jar

CROSS = {"Sec-Fetch-Site": "cross-site"}


@pytest.fixture
def keyed(endpoint: Server, tmp_path: Path) -> Iterator[Console]:
    with console(tmp_path, endpoint, ADMIN) as served:
        served.server.gateway.authenticate = served.server.accounts.authenticate
        yield served


def check_unframed(reply: aiohttp.ClientResponse) -> None:
    assert reply.headers.getall("x-frame-options") == ["DENY"], reply.url
    [policy] = reply.headers.getall("content-security-policy")
    assert "frame-ancestors 'none'" in policy, reply.url


PAGES = [
    *(("GET", path) for path in ("", "/", "/login", "/login?token=wrong", "/overview", "/nothing")),
    *(("GET", path) for path in ("/requests", "/requests/req_1", "/requests/req_1/explanation")),
    *(("GET", path) for path in ("/requests/req_1/images/x", "/static/console.css", "/static/x")),
    *(("GET", path) for path in ("/evaluations", "/keys", "/knowledge", "/cache", "/playground")),
    *(("POST", path) for path in ("/login", "/logout", "/overview", "/keys", "/static/console.js")),
    *(("PUT", "/login"), ("DELETE", "/keys"), ("OPTIONS", "/login"), ("HEAD", "/login")),
]


async def test_no_response_of_the_console_can_be_framed(keyed: Console) -> None:
    async with aiohttp.ClientSession(cookie_jar=jar()) as session:

        async def check_all() -> None:
            for method, path in PAGES:
                for headers in (SAME, CROSS, {"Host": "evil.example"}):
                    async with session.request(
                        method, keyed.url + path, headers=headers, allow_redirects=False
                    ) as reply:
                        check_unframed(reply)

        await check_all()
        form = {"key": keyed.keys["boss"]}
        async with session.post(f"{keyed.url}/login", data=form, headers=SAME) as reply:
            assert reply.url.path == "/ui/overview"
        await check_all()
        async with session.get(f"{keyed.api}/models") as reply:
            assert "x-frame-options" not in reply.headers


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize(
    ("allowed", "host", "is_allowed"),
    [
        ((), "localhost", True),
        (("gate.local",), "localhost:8000", True),
        (("gate.local",), "[::1]", True),
        (("gate.local",), "gate.local", True),
        (("gate.local",), "GATE.local:443", True),
        (("gate.local",), "evil.example", False),
        (("gate.local",), "gate.local.evil.example", False),
        (("gate.local",), "10.0.0.7", False),
    ],
)
async def test_pages_refuse_foreign_host_names(
    keyed: Console, has_keys: bool, allowed: tuple[str, ...], host: str, is_allowed: bool
) -> None:
    gateway = keyed.server.gateway
    gateway.allowed_hosts = allowed
    if not has_keys:
        gateway.authenticate = None
    async with aiohttp.ClientSession(headers={"Host": host}) as session:
        for path in ("/login", "/overview", "/nothing", "/static/console.css", ""):
            async with session.get(keyed.url + path, allow_redirects=False) as reply:
                assert (reply.status == 403) is not is_allowed, path
                if not is_allowed:
                    assert (await reply.json())["error"]["code"] == "host_forbidden"


async def test_host_names_are_free_with_keys_unless_some_are_listed(keyed: Console) -> None:
    key = {"Authorization": f"Bearer {keyed.keys['boss']}"}
    async with aiohttp.ClientSession(headers={"Host": "proxy.example"}) as session:
        async with session.get(f"{keyed.url}/login") as reply:
            assert reply.status == 200
        keyed.server.gateway.allowed_hosts = ("gate.local",)
        async with session.get(f"{keyed.url}/login") as reply:
            assert reply.status == 403
        async with session.get(f"{keyed.api}/models", headers=key) as reply:
            assert reply.status == 200  # a page of another name has no key


@pytest.mark.parametrize("is_local", [True, False])
async def test_console_without_a_gateway_has_the_same_rules(tmp_path: Path, is_local: bool) -> None:
    app = standalone_app([tmp_path], None, None, TOKEN, is_local=is_local)
    with running(app) as url:
        base = url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session:
            for host, expected in (("localhost", 200), ("evil.example", 403 if is_local else 200)):
                async with session.get(f"{base}/ui/login", headers={"Host": host}) as reply:
                    assert reply.status == expected
                    check_unframed(reply)
            for path in ("/ui", "/ui/nothing", "/ui/static/x", "/elsewhere", "/ui/login?token=x"):
                async with session.get(base + path, allow_redirects=False) as reply:
                    check_unframed(reply)
