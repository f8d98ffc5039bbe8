from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from itsdangerous import TimestampSigner

from bottega.gateway.accounting.accounts import Accounts
from bottega.ui.sessions import COOKIE, SESSION_SECONDS, Sessions
from tests.server import Server
from tests.ui.conftest import TOKEN, console
from tests.ui.test_pages import ADMIN, TEAM

SAME = {"Sec-Fetch-Site": "same-origin"}


def jar() -> aiohttp.CookieJar:
    return aiohttp.CookieJar(unsafe=True)  # cookies of an address without a name


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with closing(Accounts(tmp_path / "gateway.db")) as opened:
        yield opened


def test_a_cookie_opens_the_session_of_its_key(accounts: Accounts) -> None:
    account, key = accounts.add("ann", namespace="team-a")
    sessions = Sessions(accounts)
    cookie = sessions.login(key)
    assert cookie is not None and key not in cookie
    user = sessions.user(cookie)
    assert user is not None and user.account == account
    assert user.can_edit and not user.sees_all
    read_only = sessions.user(sessions.login(key, read_only=True))
    assert read_only is not None and not read_only.can_edit


def test_other_gateways_with_the_same_accounts_accept_it(
    accounts: Accounts, tmp_path: Path
) -> None:
    _, key = accounts.add("ann")
    with closing(Accounts(tmp_path / "gateway.db")) as others:
        assert Sessions(others).user(Sessions(accounts).login(key)) is not None


def test_a_revoked_key_ends_its_sessions(accounts: Accounts) -> None:
    account, key = accounts.add("ann")
    sessions = Sessions(accounts)
    cookie = sessions.login(key)
    accounts.revoke(account.id)
    assert sessions.user(cookie) is None and sessions.login(key) is None


def test_logout_ends_all_sessions_of_the_key_everywhere(accounts: Accounts, tmp_path: Path) -> None:
    account, key = accounts.add("ann")
    _, other_key = accounts.add("bob")
    with closing(Accounts(tmp_path / "gateway.db")) as others:
        here, elsewhere = Sessions(accounts), Sessions(others)
        cookies = [here.login(key), here.login(key, read_only=True), elsewhere.login(key)]
        untouched = here.login(other_key)
        user = here.user(cookies[0])
        assert user is not None
        here.logout(user)
        others.list()  # refreshes, as its thread does within a second
        for sessions in (here, elsewhere):
            assert [sessions.user(cookie) for cookie in cookies] == [None] * 3
            assert sessions.user(untouched) is not None
        later = here.login(key)  # in the same second
        assert here.user(later) is not None and elsewhere.user(later) is not None
    with closing(Accounts(tmp_path / "gateway.db")) as again:  # after a restart
        assert Sessions(again).user(cookies[0]) is None
        assert Sessions(again).user(later) is not None
        assert again.authenticate(key) == account


def test_logout_ends_the_sessions_of_the_link(accounts: Accounts) -> None:
    sessions = Sessions(accounts, token="secret")
    cookies = [sessions.login("secret"), sessions.login("secret")]
    user = sessions.user(cookies[0])
    assert user is not None
    sessions.logout(user)
    assert [sessions.user(cookie) for cookie in cookies] == [None, None]
    assert sessions.user(sessions.login("secret")) is not None


async def test_a_copied_cookie_ends_with_the_logout(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, ADMIN, TEAM) as served:
        async with (
            aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session,
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=SAME) as copier,
        ):
            form = {"key": served.keys["ann"]}
            async with session.post(f"{served.url}/login", data=form) as reply:
                assert reply.url.path == "/ui/overview"
                copied = reply.history[0].cookies.output(attrs=[], header="", sep=";").strip()
            page = f"{served.url}/requests"
            async with copier.get(page, headers={"Cookie": copied}) as reply:
                assert (reply.status, reply.url.path) == (200, "/ui/requests")
            async with session.post(f"{served.url}/logout", headers={"Sec-Fetch-Site": "none"}):
                pass  # of another site: no logout
            async with copier.get(page, headers={"Cookie": copied}) as reply:
                assert reply.url.path == "/ui/requests"
            async with session.post(f"{served.url}/logout") as reply:
                assert reply.url.path == "/ui/login"
            async with copier.get(page, headers={"Cookie": copied}) as reply:
                assert reply.url.path == "/ui/login"
            async with session.post(f"{served.url}/logout") as reply:  # without a session
                assert reply.url.path == "/ui/login"


def test_changed_and_old_cookies_are_rejected(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = accounts.add("ann")
    other, _ = accounts.add("boss", admin=True)
    sessions = Sessions(accounts)
    cookie = sessions.login(key)
    assert cookie is not None
    signed = cookie.partition(".")[2]
    # Not the last character: some of its bits are padding, so another one may mean the same.
    changed = cookie[:-2] + ("B" if cookie[-2] == "A" else "A") + cookie[-1]
    for forged in ("", "x", changed, f"{other.id}.{signed}", f"local.{signed}", None):
        assert sessions.user(forged) is None
    late = TimestampSigner.get_timestamp(TimestampSigner("x")) + SESSION_SECONDS + 60
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda self: late)
    assert sessions.user(cookie) is None


def test_the_token_opens_only_a_console_that_has_one(accounts: Accounts) -> None:
    sessions = Sessions(accounts, token="secret")
    user = sessions.user(sessions.login("secret"))
    assert user is not None and user.sees_all
    assert Sessions(accounts).login("secret") is None
    assert Sessions(accounts, token="secret").user(sessions.login("secret")) is None


async def test_a_link_with_a_key_opens_nothing(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, ADMIN, TEAM) as served:
        async with aiohttp.ClientSession(cookie_jar=jar()) as session:
            for token in (served.keys["ann"], "x", "\ud800", "%00"):
                link = f"{served.url}/login?token={quote(token.encode(errors='replace'))}"
                async with session.get(link) as reply:
                    assert reply.status == 401 and COOKIE not in reply.cookies
                    assert served.keys["ann"] not in await reply.text()


async def test_forms_of_other_sites_are_rejected(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        async with aiohttp.ClientSession(cookie_jar=jar()) as session:
            cookie = served.url.removesuffix("/ui")
            async with session.get(f"{served.url}/login?token={TOKEN}") as reply:
                assert reply.status == 200 and cookie
            form = {"question": "What is 3 + 4?", "action": "ask"}
            for headers in (
                {},
                {"Sec-Fetch-Site": "cross-site"},
                {"Sec-Fetch-Site": "same-site", "Origin": cookie},
                {"Origin": "http://evil.example"},
            ):
                async with session.post(
                    f"{served.url}/playground", data=form, headers=headers
                ) as reply:
                    assert reply.status == 403
            assert [body for body in endpoint.bodies if body] == []
            for headers in (SAME, {"Origin": cookie}):
                async with session.post(
                    f"{served.url}/playground", data=form, headers=headers
                ) as reply:
                    assert reply.status == 200


async def test_pages_need_a_session_and_return_to_the_page(
    endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, ADMIN, TEAM) as served:
        async with aiohttp.ClientSession(cookie_jar=jar()) as session:
            async with session.get(f"{served.url}/requests?tier=small") as reply:
                assert reply.url.path == "/ui/login"
                wanted = reply.url.query["next"]
            async with session.post(
                f"{served.url}/login", data={"key": "sk-bottega-x"}, headers=SAME
            ) as reply:
                assert reply.status == 401 and COOKIE not in reply.cookies
            for target, landed in (
                (wanted, "/ui/requests"),
                ("http://evil.example/ui/x", "/ui/overview"),
                ("//evil.example/ui/", "/ui/overview"),
                ("/\\evil.example", "/ui/overview"),
            ):
                form = {"key": served.keys["ann"], "next": target}
                async with session.post(f"{served.url}/login", data=form, headers=SAME) as reply:
                    assert reply.url.path == landed
                    [cookie] = reply.history[0].headers.getall("Set-Cookie")
                    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
            async with session.post(f"{served.url}/logout", headers=SAME) as reply:
                assert reply.url.path == "/ui/login"


async def test_a_read_only_session_changes_nothing(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, ADMIN) as served:
        async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
            form = {"key": served.keys["boss"], "read_only": "yes"}
            async with session.post(f"{served.url}/login", data=form) as reply:
                assert reply.status == 200
            form = {"question": "What is 3 + 4?", "action": "ask"}
            async with session.post(f"{served.url}/playground", data=form) as reply:
                assert reply.status == 403
        assert [body for body in endpoint.bodies if body] == []
