from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

TEAM = ("--namespace", "team-a")


@pytest.fixture
def file(run: Run, pets: Path) -> str:
    """Return a file with twelve examples in team-a, and those of leaf in the default namespace."""
    run("add", "k.db", pets, "--embed", "pixels", *TEAM)
    shutil.copytree(pets / "leaf", "one/leaf")
    run("add", "k.db", "one")
    return "k.db"


def record(json: object) -> dict[str, Any]:
    assert isinstance(json, dict)
    return json


def ids(run: Run, *arguments: str) -> list[str]:
    listed = run("ls", *arguments, "--json").json
    assert isinstance(listed, list)
    return [row["id"] for row in listed]


def test_a_command_sees_one_namespace(run: Run, file: str) -> None:
    unnamed, team = ids(run, file), ids(run, file, *TEAM)
    assert (len(unnamed), len(team)) == (4, 12)
    [ruby, *_] = ids(run, file, "--label", "ruby", *TEAM)
    for command in ("show", "pin", "unpin", "rm"):
        assert run(command, file, ruby).code == 1
    assert record(run("show", file, ruby, *TEAM, "--json").json)["answer"] == "ruby"
    assert run("pin", file, ruby, *TEAM, "--json").json == {"changed": 1, "pinned": 1}
    assert record(run("stats", file, "--json").json)["pinned"] == 0
    assert run("unpin", file, ruby, *TEAM, "--json").json == {"changed": 1, "pinned": 0}
    assert "namespace 'team-a', holds 11 examples" in run("rm", file, ruby, *TEAM).out
    assert ids(run, file) == unnamed


def test_demonstrations_come_from_the_named_namespace(run: Run, file: str) -> None:
    image = "pets/sky/0.png"
    options = ("--shots", 12, "--json", "--traces", "none")
    for names, labels in ((TEAM, {"leaf", "ruby", "sky"}), ((), {"leaf"})):
        answers = run("classify", file, image, *options, *names).json
        assert isinstance(answers, list)
        answer = run("ask", "What is this?", "-i", image, "--kb", file, *options, *names).json
        for each in (*answers, record(answer)):
            assert {shown["answer"] for shown in each["demonstrations"]} == labels
    without_file = run("ask", "What is this?", *TEAM)
    assert (without_file.code, "--kb" in without_file.err) == (2, True)


def test_stats_count_the_other_namespaces(run: Run, file: str) -> None:
    stats = record(run("stats", file, "--json").json)
    assert (stats["examples"], stats["namespaces"]) == (4, {"": 4, "team-a": 12})
    assert record(run("stats", file, *TEAM, "--json").json)["labels"] == 3
    assert "team-a" in run("stats", file).out.split("other namespace")[1]
    shutil.copytree("one", "single")
    run("add", "other.db", "single", "--embed", "pixels")
    assert "other namespace" not in run("stats", "other.db").out


def test_export_reports_other_namespaces_and_import_sets_one(run: Run, file: str) -> None:
    exported = run("export", file, "copy", "--json")
    assert exported.json == {"examples": 4, "skipped": []}
    assert "not exported: 12 in 'team-a'" in exported.err
    assert "--namespace team-a" in exported.err
    assert "12 examples written" in run("export", file, "team", *TEAM).out
    for folder, names in (("copy", ()), ("team", TEAM)):
        run("import", "other.db", folder, "--embed", "pixels", *names)
    assert ids(run, "other.db", *TEAM) == ids(run, file, *TEAM)
    assert "12 in 'team-a'" not in run("export", "other.db", "again", *TEAM).err


def test_an_empty_namespace_names_the_others(run: Run, file: str) -> None:
    run("rm", file, *ids(run, file))
    expected = "no examples in namespace ''; there are 12 in 'team-a'"
    listed = run("ls", file, "--json")
    assert (listed.json, listed.code) == ([], 0)
    for done in (listed, run("ls", file), run("ls", file, "--label", "leaf")):
        assert expected in done.err
        assert "--namespace team-a" in done.err
    for arguments in (("classify", file, "query.jpg"), ("ask", "what?", "--kb", file)):
        failed = run(*arguments)
        assert failed.code == 1
        assert expected in failed.err
        assert "--namespace team-a" in failed.err


def test_hints_quote_names_for_the_shell(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels", "--namespace", "it's ours")
    assert "--namespace 'it'\"'\"'s ours'" in run("ls", "k.db").err


def test_only_the_first_namespaces_are_named(run: Run, pets: Path) -> None:
    for i in range(7):
        run("add", "k.db", pets, "--embed", "pixels", "--namespace", f"n{i}")
    error = run("ls", "k.db").err
    assert "12 in 'n4', and 2 more namespaces; add --namespace NAME" in error


def test_reindex_embeds_every_namespace(run: Run, file: str) -> None:
    done = run("reindex", file, "--embed", "pixels", "--by", "looks", "--json").json
    assert record(done)["embedded"] == 16
