"""Requests to the console that no page of it sends, and many of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from bottega.gateway.accounting.ledger_schema import Account
from bottega.ui.pages import query_string
from bottega.ui.sessions import COOKIE, Sessions
from tests.builders import solid_image
from tests.gateway.half_requests import begin, reply
from tests.server import Server, running
from tests.ui.base_console import TOKEN, base_console
from tests.ui.conftest import Console, console
from tests.ui.test_pages import TEAM
from tests.ui.test_sessions import SAME, jar

MANY = 48  # more than the threads of the gateway and of the console


async def test_many_questions_at_once_are_all_answered(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        endpoint.answers = endpoint.answers * (MANY + 1)

        async def ask(session: aiohttp.ClientSession, number: int) -> str:
            form = aiohttp.FormData({"question": f"What is {number}?", "action": "ask"})
            form.add_field("images", solid_image(number).data, filename="a.png")
            async with session.post(f"{served.url}/playground", data=form) as reply:
                return await reply.text()

        async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
            await session.get(f"{served.url}/login?token={TOKEN}")
            async with asyncio.timeout(60):
                pages = await asyncio.gather(*(ask(session, n) for n in range(MANY)))
        assert all('<p class="answer">seven</p>' in page for page in pages)


async def test_empty_questions_are_rejected(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        endpoint.bodies.clear()
        async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
            await session.get(f"{served.url}/login?token={TOKEN}")
            for action in ("ask", "add"):
                form = {"question": " ", "answer": "seven", "action": action}
                async with session.post(f"{served.url}/playground", data=form) as reply:
                    assert reply.status == 400
                    assert "the question is empty" in await reply.text()
        assert endpoint.bodies == []


async def test_odd_origins_are_rejected(tmp_path: Path) -> None:
    odd: tuple[dict[str, str], ...] = (
        {"Origin": "http://["},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "none"},
        {},
    )
    with base_console(tmp_path) as served:
        for headers, path in product(odd, ("login", "logout")):
            url, form = f"{served.url}/{path}", {"key": TOKEN}
            async with aiohttp.request("POST", url, data=form, headers=headers) as reply:
                assert reply.status == 403 and "did not come" in await reply.text()


async def test_odd_logins_are_rejected_with_a_page(tmp_path: Path) -> None:
    multipart = {**SAME, "Content-Type": "multipart/form-data; charset=unicode_escape; boundary=b"}
    surrogate = b'--b\r\nContent-Disposition: form-data; name="key"\r\n\r\n\\ud800\r\n--b--\r\n'
    file = aiohttp.FormData({"key": TOKEN})
    file.add_field("file", b"x", filename="x")
    with base_console(tmp_path) as served:
        async with aiohttp.ClientSession(cookie_jar=jar()) as session:
            for data, headers, status in (
                ({"key": "x" * 100_000}, SAME, 413),
                (surrogate, multipart, 401),
                (b"garbage", multipart, 400),
                (file, SAME, 400),
                ({"key": "\0"}, SAME, 401),
            ):
                url = f"{served.url}/login"
                async with session.post(url, data=data, headers=headers) as reply:
                    assert reply.status == status
                    assert reply.content_type == "text/html" and not reply.cookies
            form = {"key": TOKEN, "next": "//["}
            async with session.post(url, data=form, headers=SAME) as reply:
                assert reply.url.path == "/ui/cache"


def test_forms_without_files_have_a_lower_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsers of them may take time quadratic in the length of a field."""
    monkeypatch.setattr("bottega.ui.forms.MAX_URLENCODED", 1000)
    file = aiohttp.FormData({"label": "shade"})
    file.add_field("images", b"x" * 2000, filename="a.png")
    with base_console(tmp_path) as served:
        sent = [("POST", "/knowledge/add", form) for form in ({"answer": "x" * 2000}, file)]
        (status, text), (_, of_file) = served.send(TOKEN, sent)
    assert status == 413 and "larger than 1,000 bytes" in text
    assert "a.png is not a readable image" in of_file


async def test_links_do_not_put_text_on_the_login_page(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        async with aiohttp.request("GET", f"{served.url}/login?message=Send+your+key") as reply:
            assert reply.status == 200 and "Send your key" not in await reply.text()


async def test_consoles_at_two_ports_of_a_host_have_their_own_sessions(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with base_console(tmp_path) as one, base_console(tmp_path / "b") as other:
        async with aiohttp.ClientSession(cookie_jar=jar()) as session:
            for served in (one, other):
                await session.get(f"{served.url}/login?token={TOKEN}")
            for served in (one, other):
                async with session.get(f"{served.url}/cache", allow_redirects=False) as reply:
                    assert reply.status == 200


async def test_cookies_behind_a_proxy_that_ends_tls_are_secure(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        async with aiohttp.ClientSession() as session:
            for origin, secure in (("https://bottega.example", True), ("http://b.example", False)):
                async with session.post(
                    f"{served.url}/login",
                    data={"key": TOKEN},
                    headers={**SAME, "Origin": origin},
                    allow_redirects=False,
                ) as reply:
                    assert ("Secure" in reply.headers["Set-Cookie"]) is secure


async def test_a_form_without_a_session_gets_a_page(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        url, form = f"{served.url}/cache/x", {"answer": "long"}
        async with aiohttp.request("POST", url, data=form, headers=SAME) as reply:
            text = await reply.text()
            assert reply.status == 401 and "<main" in text and "the session has ended" in text


def test_odd_paths_and_texts_are_not_found(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        served.base().add([])
        odd = (
            *(
                "/cache/xxxx%00",
                "/cache/xxxx%FF",
                f"/cache/xxxx/images/{'9' * 5000}",
                "/cache/xxxx/images/%00",
            ),
            *("/cache/..%2f..%2fetc%2fpasswd", "/static/..%2fapp.py"),
        )
        found = served.send(TOKEN, [("GET", path, None) for path in odd])
        assert [status for status, _ in found] == [404] * len(odd)
        texts = ("%00", "%ED%A0%80", "%25_~'\"", "x" * 20_000, "%F0%9F%92%A9")
        found = served.send(TOKEN, [("GET", f"/cache?text={text}", None) for text in texts])
        assert [status for status, _ in found] == [200] * len(texts)


def test_messages_with_lone_surrogates_are_sent() -> None:
    assert query_string({"message": "added \udcff"}) == "?message=added+%3F"


async def test_a_key_uses_a_limited_number_of_namespaces(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, TEAM) as served:
        [account] = served.server.accounts.list()
        served.server.accounts.update(account.id, max_namespaces=1)
        lines = b'{"question": "q", "answer": "a"}'
        async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
            await session.post(f"{served.url}/login", data={"key": served.keys["ann"]})
            for namespace, status in (("a", 200), ("b", 403), ("a", 200)):
                form = aiohttp.FormData({"namespace": f"team-a/{namespace}"})
                form.add_field("file", lines, filename="c.jsonl")
                async with session.post(f"{served.url}/cache/import", data=form) as reply:
                    assert reply.status == status
            form = aiohttp.FormData(
                {"namespace": "team-a/c", "question": "q", "answer": "a", "action": "add"}
            )
            async with session.post(f"{served.url}/playground", data=form) as reply:
                assert reply.status == 403


def test_clients_do_not_see_paths_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "cache.db").write_bytes(b"SQLite format 3\0 but damaged" * 100)
    with base_console(tmp_path) as served:
        key = served.key(replace(TEAM, name="ann"))
        [(status, text)] = served.send(key, [("GET", "/cache", None)])
        assert status == 500 and str(tmp_path) not in text
        boss = served.key(Account("", "boss", admin=True))
        [(status, text)] = served.send(boss, [("GET", "/cache", None)])
        assert status == 500 and str(tmp_path) in text


# Accounts that may not submit the forms: "nora" has no right to store, "eve" may only view.
DENIED = {
    "/cache/import": ("nora", "eve"),
    "/cache/x": ("nora", "eve"),
    "/knowledge/add": ("nora", "eve"),
    "/playground": ("eve",),
    "/requests/x/replay": ("eve",),
    "/requests/x/feedback": ("eve",),
    "/keys": ("ann", "nora", "eve"),
    "/keys/x/change": ("ann", "nora", "eve"),
}


@pytest.mark.parametrize(
    ("path", "name", "read_only"),
    [
        *((path, name, False) for path, names in DENIED.items() for name in names),
        *((path, "ann", True) for path in DENIED),
    ],
)
def test_forms_are_not_read_without_the_right_to_change(
    many_keys: Console, path: str, name: str, read_only: bool
) -> None:
    status, text = half_form(many_keys, path, name, 100 << 20, read_only=read_only)
    assert status == 403 and "this session may not" in text


def test_a_read_only_session_sends_no_more_than_an_image(many_keys: Console) -> None:
    status, text = half_form(many_keys, "/cache", "ann", 30 << 20, read_only=True)
    assert status == 413 and "the upload is larger than" in text


def test_a_stalled_form_gets_a_page(many_keys: Console) -> None:
    many_keys.server.inner.bodies.stalled_seconds = 0.1
    for path in ("/login", "/playground", "/knowledge/add"):
        status, text = half_form(many_keys, path, "ann", 9999)
        assert status == 408 and "<main" in text and "did not arrive in time" in text


def half_form(
    served: Console, path: str, name: str, length: int, *, read_only: bool = False
) -> tuple[int, str]:
    """Send the beginning of a form of this length, and return status and text of the reply."""
    cookie = Sessions(served.server.accounts).login(served.keys[name], read_only=read_only)
    headers = {
        "cookie": f"{COOKIE}_{urlsplit(served.url).port}={cookie}",
        "content-type": "multipart/form-data; boundary=b",
        **SAME,
    }
    return reply(begin(served.url, "POST", f"/ui{path}", headers, length, b"--b\r\n"))


@pytest.fixture(scope="module")
def many_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    accounts = (
        Account("a", "ann", namespace="team-a"),
        Account("n", "nora", namespace="team-a", can_store=False),
        Account("e", "eve", viewer=True),
    )
    folder = tmp_path_factory.mktemp("console")
    with running() as endpoint, console(folder, endpoint, *accounts) as served:
        yield served
