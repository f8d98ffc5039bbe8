from __future__ import annotations

import hashlib
import logging
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import NotFoundError, SettingError, StoreError
from bottega.gateway.accounting.accounts import MAX_KEEP_SECONDS, MAX_NAME_LENGTH, TOKEN, Accounts
from bottega.knowledge import KnowledgeBase


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    opened = Accounts(tmp_path / "gateway.db")
    yield opened
    opened.close()


def test_key_returns_its_account(accounts: Accounts) -> None:
    account, token = accounts.add(
        "team-a", namespace="a", can_store=False, requests_per_minute=60, usd_per_month=5.0
    )
    other, others = accounts.add("team-b", admin=True)
    assert accounts.authenticate(token) == account
    assert accounts.authenticate(others) == other
    assert (account.namespace, account.can_store, account.admin) == ("a", False, False)
    assert (account.requests_per_minute, account.usd_per_month) == (60, 5.0)
    assert (other.namespace, other.can_store, other.admin) == ("", True, True)
    assert accounts.list() == [account, other]


def test_other_texts_are_not_keys(accounts: Accounts) -> None:
    _, token = accounts.add("team-a")
    flipped = token[:-1] + ("0" if token[-1] != "0" else "1")
    other_id = token[:11] + "f" * 12 + token[23:]
    unissued = "sk-bottega-" + "0" * 12 + "-" + "0" * 64
    wrong = [None, "", flipped, other_id, unissued, token + "\n", f" {token}", token.upper()]
    wrong += [token[:-1], token + "0", "sk-bottega--", "' OR 1=1 --", "\ud800", "x" * 100_000]
    assert [accounts.authenticate(each) for each in wrong] == [None] * len(wrong)
    assert accounts.authenticate(token) is not None


def test_key_is_not_stored(accounts: Accounts, tmp_path: Path) -> None:
    account, token = accounts.add("team-a")
    secret = TOKEN.fullmatch(token)
    assert secret is not None
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert secret[2].encode() not in kept
    assert hashlib.sha256(secret[2].encode()).digest() in kept
    assert secret[2] not in repr(account) + repr(accounts.list()) + repr(vars(accounts))
    assert secret[1] in repr(account)


def test_revoked_key_is_rejected(accounts: Accounts) -> None:
    account, token = accounts.add("team-a")
    revoked = accounts.revoke(account.id)
    assert revoked.revoked is not None
    assert accounts.authenticate(token) is None
    assert accounts.revoke(account.id) == revoked
    assert accounts.list() == [revoked]


def test_leaked_key_can_be_revoked_by_its_value(accounts: Accounts) -> None:
    account, token = accounts.add("team-a")
    assert accounts.revoke(token).id == account.id
    assert accounts.authenticate(token) is None
    unknown = token[:11] + "f" * 12 + token[23:]
    with pytest.raises(NotFoundError) as raised:
        accounts.revoke(unknown)
    assert unknown[24:] not in str(raised.value)


def test_changes_of_another_process_apply_within_a_second(
    accounts: Accounts, tmp_path: Path
) -> None:
    account, token = accounts.add("team-a")
    code = (
        "import sys; from bottega.gateway.accounting.accounts import Accounts\n"
        "accounts = Accounts(sys.argv[1])\n"
        "print(accounts.add('team-b')[1])\naccounts.revoke(sys.argv[2])\naccounts.close()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "gateway.db"), account.id]
    assert accounts.authenticate(token) == account
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    end = time.monotonic() + 20
    while time.monotonic() < end and accounts.authenticate(token) is not None:
        time.sleep(0.01)
    assert accounts.authenticate(token) is None
    added = accounts.authenticate(done.stdout.strip())
    assert added is not None
    assert added.name == "team-b"


def test_failed_refresh_keeps_the_last_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.accounting.accounts.POLL_SECONDS", 0.02)
    with closing(Accounts(tmp_path / "gateway.db")) as accounts:
        account, token = accounts.add("team-a")
        with caplog.at_level(logging.ERROR):
            rename(tmp_path / "gateway.db", "gateway_accounts", "gone")
            wait_until(lambda: bool(caplog.records))
            time.sleep(0.1)  # several more attempts
        assert accounts.authenticate(token) == account
    assert len([r for r in caplog.records if "those last read stay valid" in r.message]) == 1
    assert token[24:] not in caplog.text


def test_each_failure_to_read_the_keys_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.accounting.accounts.POLL_SECONDS", 0.02)
    file = tmp_path / "gateway.db"
    with closing(Accounts(file)) as accounts:
        for failures in range(1, 3):
            rename(file, "gateway_accounts", "gone")
            wait_until(lambda: bool(caplog.records))
            time.sleep(0.1)  # several more attempts
            assert len(caplog.records) == 1, failures
            rename(file, "gone", "gateway_accounts")
            wait_until(partial(knows_new_key, accounts, file, f"team-{failures}"))
            caplog.clear()


def rename(file: Path, table: str, name: str) -> None:
    with closing(sqlite3.connect(file, timeout=10)) as connection, connection:
        connection.execute(f"ALTER TABLE {table} RENAME TO {name}")


def knows_new_key(accounts: Accounts, file: Path, name: str) -> bool:
    """Add a key in another connection and return whether `accounts` has read it soon after."""
    with closing(Accounts(file)) as other:
        _, token = other.add(name)
    time.sleep(0.1)
    return accounts.authenticate(token) is not None


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the condition was not met in 30 seconds")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "  "},
        {"name": "a\0b"},
        {"name": "\ud800"},
        {"name": "\x1b[31m"},
        {"name": "n" * 201},
        {"namespace": "a\nb"},
        {"namespace": "\udcff"},
        {"namespace": "n" * 201},
        {"requests_per_minute": 0},
        {"requests_per_minute": 2**31},
        {"usd_per_month": -1.0},
        {"usd_per_month": float("nan")},
        {"usd_per_month": float("inf")},
    ],
)
def test_invalid_accounts_are_rejected(accounts: Accounts, wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError) as raised:
        accounts.add(**{"name": "team-a", **wrong})  # type: ignore[arg-type]
    assert raised.value.hint
    assert accounts.list() == []


def test_authentication_is_fast(accounts: Accounts) -> None:
    _, token = accounts.add("team-a")

    def seconds(token: str) -> float:
        begun = time.thread_time()
        for _ in range(500):
            accounts.authenticate(token)
        return (time.thread_time() - begun) / 500

    other = token[:11] + "f" * 12 + token[23:]
    rounds = [
        (seconds(token), seconds(other)) for _ in range(40)
    ]  # alternate: the machine may slow
    right, unknown = map(min, zip(*rounds, strict=True))
    assert right < 50e-6
    assert 0.5 < right / unknown < 2


def test_other_files_are_rejected(tmp_path: Path) -> None:
    KnowledgeBase.open(tmp_path / "k.db", None).close()
    with pytest.raises(StoreError, match="not a gateway database"):
        Accounts(tmp_path / "k.db")
    with pytest.raises(StoreError, match="does not exist"):
        Accounts(tmp_path / "none.db", create=False)
    with pytest.raises(StoreError, match="does not exist"):
        Accounts(tmp_path / "none" / "gateway.db")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("column", ["digest", "id", "name", "namespace"])
def test_a_damaged_account_raises_a_store_error(tmp_path: Path, column: str) -> None:
    path = tmp_path / "gateway.db"
    with closing(Accounts(path)) as accounts:
        accounts.add("team")
    wrong = "5.5" if column == "digest" else "x'ff'"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE gateway_accounts SET {column} = {wrong}")
        connection.commit()
    with pytest.raises(StoreError):
        Accounts(path)


MAX_INT = 2**31 - 1


@pytest.mark.parametrize(
    ("setting", "valid", "wrong"),
    [
        ("requests_per_minute", [None, 1, MAX_INT], [0, -1, MAX_INT + 1]),
        ("usd_per_month", [None, 0, 0.01, 1e9], [-0.01, float("inf"), float("nan")]),
        ("max_concurrent", [None, 1, MAX_INT], [0, -1, MAX_INT + 1]),
        ("max_namespaces", [None, 0, MAX_INT], [-1, MAX_INT + 1]),
        ("namespace", ["", "x" * MAX_NAME_LENGTH], ["x" * (MAX_NAME_LENGTH + 1), "a\n", "\ud800"]),
    ],
)
def test_settings_of_a_key_have_exact_limits(
    accounts: Accounts, setting: str, valid: list[Any], wrong: list[Any]
) -> None:
    for value in wrong:
        with pytest.raises(SettingError):
            accounts.add("team", **{setting: value})
    assert accounts.list() == []
    for value in valid:
        made, token = accounts.add("team", **{setting: value})
        assert getattr(made, setting) == value
        assert accounts.authenticate(token) == made


def test_key_name_has_exact_limits(accounts: Accounts) -> None:
    for name in ("", " ", "x" * (MAX_NAME_LENGTH + 1), "a\n", "\ud800"):
        with pytest.raises(SettingError):
            accounts.add(name)
    for name in ("x", "x" * MAX_NAME_LENGTH):
        assert accounts.add(name)[0].name == name


@pytest.fixture(params=["file", "database"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Accounts]:
    is_file = request.param == "file"
    location = tmp_path / "gateway.db" if is_file else request.getfixturevalue("database")
    with closing(Accounts(location)) as accounts:
        yield accounts


def test_settings_of_a_key_change(opened: Accounts) -> None:
    account, token = opened.add("team-a", usd_per_month=5.0, tiers=["small"])
    changed = opened.update(account.id, usd_per_month=None, requests_per_minute=7, tiers=("*",))
    assert opened.authenticate(token) == changed
    assert (changed.usd_per_month, changed.requests_per_minute) == (None, 7)
    assert (changed.name, changed.tiers) == ("team-a", ("*",))
    for wrong in ({"usd_per_month": -1.0}, {"created": 0.0}, {"name": None}, {"color": 1}):
        with pytest.raises(SettingError):
            opened.update(account.id, **wrong)
    with pytest.raises(NotFoundError):
        opened.update("0" * 12, requests_per_minute=1)
    assert opened.authenticate(token) == changed


def test_a_key_expires(opened: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    account, token = opened.add("team-a", expires=now + 60)
    assert opened.authenticate(token) == opened.find(account.id) == account
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert opened.authenticate(token) is opened.find(account.id) is None
    assert opened.signing_keys(account.id) is None and opened.sign_in(token) is None
    opened.update(account.id, expires=None)
    assert opened.authenticate(token) is not None


def test_a_rotated_key_is_replaced(opened: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    account, first = opened.add("team-a")
    _, second = opened.rotate(account.id)
    assert opened.authenticate(first) is None
    assert opened.authenticate(second) == account
    _, third = opened.rotate(account.id, keep_seconds=60)
    assert opened.authenticate(second) == opened.authenticate(third) == account
    assert opened.authenticate(first) is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert opened.authenticate(second) is None
    assert opened.authenticate(third) == account
    opened.revoke(account.id)
    assert opened.authenticate(third) is None


@pytest.mark.parametrize("seconds", [-1.0, MAX_KEEP_SECONDS + 1, 1e308])
def test_a_rotated_key_is_kept_for_a_limited_time(accounts: Accounts, seconds: float) -> None:
    account, token = accounts.add("team-a")
    with pytest.raises(SettingError, match="keep_seconds"):
        accounts.rotate(account.id, keep_seconds=seconds)
    assert accounts.authenticate(token) == account
    _, new = accounts.rotate(account.id, keep_seconds=MAX_KEEP_SECONDS)
    assert accounts.authenticate(token) == accounts.authenticate(new) == account


def test_a_revoked_key_is_not_rotated(accounts: Accounts) -> None:
    account, _ = accounts.add("team-a")
    accounts.revoke(account.id)
    with pytest.raises(SettingError, match="revoked"):
        accounts.rotate(account.id)


def test_other_handles_see_changed_and_rotated_keys(tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / "g.db")) as one, closing(Accounts(tmp_path / "g.db")) as two:
        account, token = one.add("team-a")
        one.update(account.id, requests_per_minute=3)
        assert two.list()[0].requests_per_minute == 3
        _, new = one.rotate(account.id)
        two.list()
        assert two.authenticate(token) is None and two.authenticate(new) is not None


def test_sessions_of_a_kept_key_end_with_it(
    opened: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, first = opened.add("team-a")
    _, second = opened.rotate(account.id, keep_seconds=60)
    old, new = opened.sign_in(first), opened.sign_in(second)
    keys = opened.signing_keys(account.id)
    assert old is not None and new is not None and keys is not None
    assert old[1] != new[1] and {old[1], new[1]} == set(keys[1])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert opened.signing_keys(account.id) == (account, [new[1]], 0.0)
    assert opened.sign_in(first) is None
