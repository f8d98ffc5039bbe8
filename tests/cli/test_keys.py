from __future__ import annotations

from pathlib import Path

import pytest

from bottega.gateway.accounting.accounts import Accounts
from tests.cli.conftest import Run


def test_a_key_is_created_listed_and_revoked(run: Run) -> None:
    made = run("keys", "add", "team-a", "--rpm", 60, "--usd-per-month", 5, "--namespace", "a")
    token = made.out.strip()
    assert token.startswith("sk-bottega-")
    assert "not shown again" in made.err and "restart a gateway" in made.err
    file = Path("bottega-data/gateway.db")
    accounts = Accounts(file)
    account = accounts.authenticate(token)
    assert account is not None
    assert (account.name, account.namespace, account.requests_per_minute) == ("team-a", "a", 60)
    assert (account.usd_per_month, account.admin, account.can_store) == (5.0, False, True)
    listed = run("keys", "ls")
    assert account.id in listed.out
    assert "team-a" in listed.out
    assert token[24:] not in listed.out + made.err
    revoked = run("keys", "revoke", account.id)
    assert revoked.out == f"the key of 'team-a' (id {account.id}) is revoked\n"
    accounts.list()
    assert accounts.authenticate(token) is None
    accounts.close()


def test_keys_are_printed_as_json(run: Run) -> None:
    made = run("keys", "add", "op", "--admin", "--no-store", "--json").json
    assert isinstance(made, dict)
    assert (made["account"]["admin"], made["account"]["can_store"]) == (True, False)
    assert run("keys", "ls", "--json").json == [made["account"]]
    revoked = run("keys", "revoke", made["key"], "--json").json
    assert isinstance(revoked, dict)
    assert revoked["revoked"] > 0


def test_the_data_folder_can_be_set(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "add", "one", "--data", "here/there")
    assert "one" in run("keys", "ls", "--data", "here/there").out
    monkeypatch.setenv("BOTTEGA_DATA", str(tmp_path / "here" / "there"))
    assert "one" in run("keys", "ls").out
    assert not Path("bottega-data").exists()


def test_options_come_before_environment_variables(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_DATA", str(tmp_path / "folder"))
    absent = "postgresql://postgres@127.0.0.1:1/absent"
    failed = run("keys", "add", "one", "--database", absent)
    assert failed.code == 1 and "cannot be reached" in failed.err
    monkeypatch.setenv("BOTTEGA_DATABASE", absent)
    assert "cannot be reached" in run("keys", "add", "one").err
    assert run("keys", "add", "one", "--data", "here").code == 0
    both = run("keys", "add", "one", "--data", "here", "--database", absent)
    assert both.code == 2 and "exclude each other" in both.err
    assert not (tmp_path / "folder").exists()


def test_the_data_folder_comes_from_the_gateway_file(run: Run) -> None:
    tiers = '[tiers.master]\nmodel = "bundled:master"\n'
    Path("bottega.toml").write_text(f'{tiers}[gateway]\ndata = "elsewhere"\n')
    made = run("keys", "add", "one", "--tiers", "mastre")
    assert "no tier 'mastre'; did you mean master?" in made.err
    assert "one" in run("keys", "ls", "--data", "elsewhere").out
    assert "one" in run("keys", "ls").out
    assert "has no tier" not in run("keys", "add", "two", "--tiers", "master").err


def test_errors_have_hints(run: Run) -> None:
    nothing = run("keys", "ls")
    assert (nothing.code, "bottega keys add NAME" in nothing.err) == (1, True)
    assert not Path("bottega-data").exists()
    assert run("keys", "add", "").code == 2
    assert run("keys", "add", "team-a", "--rpm", 0).code == 2
    run("keys", "add", "team-a")
    leaked = "sk-bottega-" + "1" * 12 + "-" + "2" * 64
    unknown = run("keys", "revoke", leaked)
    assert (unknown.code, "2222" in unknown.err + unknown.out) == (1, False)
    assert "hint: run bottega keys ls" in unknown.err


def test_a_second_key_of_the_same_name_is_noted(run: Run) -> None:
    assert "already" not in run("keys", "add", "ada").err
    assert "1 other valid key named 'ada'" in run("keys", "add", "ada").err


def test_keys_of_a_database(run: Run, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exposed = run("keys", "add", "team", "--database", database)
    assert (exposed.code, "secret" in exposed.err) == (2, False)
    monkeypatch.setenv("PGPASSWORD", "secret")
    made = run("keys", "add", "team", "--database", database.replace(":secret", ""))
    assert made.out.startswith("sk-bottega-") and not Path("bottega-data").exists()
    monkeypatch.setenv("SHARED", database)
    tiers = '[tiers.master]\nmodel = "bundled:master"\n'
    Path("bottega.toml").write_text(f'{tiers}[state]\ndatabase_env = "SHARED"\n')
    listed = run("keys", "ls", "--json").json
    assert isinstance(listed, list) and len(listed) == 1
    account = listed[0]
    assert account["name"] == "team"
    assert run("keys", "ls", "--data", "elsewhere").code == 1  # an option comes first
    assert run("keys", "revoke", account["id"]).code == 0
    assert run("savings").out == "no requests yet\n"
    wrong = run("keys", "ls", "--database", "mysql://u:secret@db")
    assert (wrong.code, "secret" in wrong.err) == (2, False)
    monkeypatch.setenv("SHARED", database.replace("secret", "wrong-password"))
    rejected = run("keys", "ls")
    assert (rejected.code, "wrong-password" in rejected.err) == (1, False)
    assert "rejects the user or the password" in rejected.err


def test_a_key_is_rotated_and_expires(run: Run) -> None:
    first = run("keys", "add", "team", "--expires-days", 2, "--json").json
    assert isinstance(first, dict)
    account = first["account"]
    assert account["expires"] > account["created"] + 86_400
    second = run("keys", "rotate", account["id"], "--json").json
    assert isinstance(second, dict)
    assert second["account"] == account and second["key"] != first["key"]
    viewer = run("keys", "add", "eve", "--viewer")
    assert viewer.code == 0 and "view" in run("keys", "ls").out
    assert run("keys", "add", "both", "--viewer", "--admin").code == 2
