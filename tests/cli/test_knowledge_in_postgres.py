"""Tests of commands on a knowledge base in PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega._util.locations import StoreLocation
from bottega.errors import SettingError, StoreBusyError
from tests.cli.conftest import Ran, Run


@pytest.fixture
def base(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty database without its password, which is in the environment."""
    monkeypatch.setenv("PGPASSWORD", "secret")
    return database.replace(":secret@", "@")


def json(ran: Ran) -> Any:
    assert ran.code == 0, ran.err
    return orjson.loads(ran.out)


def test_commands_on_a_file_and_on_a_database_agree(run: Run, pets: Path, base: str) -> None:
    from_file, from_database = (results(run, pets, place) for place in ("k.db", base))
    assert from_file == from_database


@pytest.mark.slow
def test_evaluations_of_a_file_and_of_a_database_agree(run: Run, pets: Path, base: str) -> None:
    results = []
    for place in ("k.db", base):
        run("add", place, pets, "--embed", "pixels")
        json(run("reindex", place, "--embed", "words", "--by", "text", "--json"))
        ran = run("eval", place, "--methods", "knn", "--shots", "3", "--json", "results.json")
        assert ran.code == 0, ran.err
        [result] = orjson.loads(Path("results.json").read_bytes())["results"]
        results.append({name: value for name, value in result.items() if name != "seconds"})
    from_file, from_database = results
    assert from_file == from_database


def results(run: Run, pets: Path, place: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "add": json(run("add", place, pets, "--embed", "pixels", "--json")),
        "add again": json(run("add", place, pets, "--json")),  # with the embedder of the base
        "ls": json(run("ls", place, "--label", "leaf", "--json")),
        "classify": json(run("classify", place, "query.jpg", "--method", "knn", "--json")),
    }
    id = found["ls"][0]["id"]
    [answer] = found.pop("classify")
    found["neighbours"] = [(one["id"], one["answer"]) for one in answer["demonstrations"]]
    assert answer["answer"] == "leaf"
    run("export", place, "exported", "--json")
    found["export"] = sorted(Path("exported/examples.jsonl").read_text().splitlines())
    found["pin"] = json(run("pin", place, id, "--json"))
    found["verify"] = json(run("verify", place, "--deep", "--json"))
    found["rm"] = json(run("rm", place, id, "--json"))
    return found


def test_an_empty_database_is_no_knowledge_base(run: Run, base: str) -> None:
    ran = run("ls", base)
    assert ran.code == 1
    assert "contains no knowledge base" in ran.err


def test_a_password_is_rejected_and_hidden(run: Run, database: str) -> None:
    for url in (database, f"{database.replace(':secret@', '@')}&password=secret"):
        ran = run("ls", url)
        assert ran.code == 2, ran.err
        assert "PGPASSWORD" in ran.err
        assert "secret" not in ran.out + ran.err
        assert "secret" not in str(StoreLocation(url)) + repr(StoreLocation(url))
    with pytest.raises(SettingError):
        StoreLocation.from_argument(database)


def test_only_one_process_holds_a_lock(tmp_path: Path, database: str) -> None:
    for target in (tmp_path / "k.db", database):
        location = StoreLocation(target)
        with location.locked(), pytest.raises(StoreBusyError), location.locked():
            raise AssertionError("locked twice")
        with location.locked():
            pass


def test_milvus_of_the_environment_is_used_for_databases_alone(
    run: Run, pets: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_VECTORS", "http://root:s3cret@db.example")
    for place in ("k.db", base):
        json(run("add", place, pets, "--embed", "pixels", "--json"))
    json(run("classify", "k.db", "query.jpg", "--method", "knn", "--json"))
    ran = run("classify", base, "query.jpg", "--method", "knn")
    assert ran.code != 0 and "not the URL of a Milvus server" in ran.err
    assert "s3cret" not in ran.err
