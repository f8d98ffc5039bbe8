from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase, TokenEmbedder, View
from bottega.protocols import Vectors
from bottega.types import Query
from tests.cli.conftest import Run
from tests.knowledge.doubles import SeededEmbedder


def ids(run: Run, file: str) -> list[str]:
    listed = run("ls", file, "--json").json
    assert isinstance(listed, list)
    return [row["id"] for row in listed]


def test_export_and_import_keep_the_examples(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    first, second, *_ = ids(run, "k.db")
    assert run("pin", "k.db", first, "--json").json == {"changed": 1, "pinned": 1}
    assert "1 changed; 2 pinned" in run("pin", "k.db", first, second).out
    assert "1 changed; 1 pinned" in run("unpin", "k.db", second).out
    assert "12 examples written" in run("export", "k.db", "copy").out
    again = run("export", "k.db", "copy")
    assert (again.code, "not empty" in again.err) == (1, True)
    imported = run("import", "other.db", "copy", "--embed", "pixels", "--json").json
    assert imported == {"new": 12, "duplicates": 0, "skipped": 0, "examples": 12}
    assert run("ls", "k.db", "--json").json == run("ls", "other.db", "--json").json
    stats = run("stats", "other.db", "--json").json
    assert isinstance(stats, dict)
    assert stats["pinned"] == 1
    assert "1 changed; 0 pinned" in run("unpin", "other.db", ids(run, "other.db")[0]).out
    assert run("import", "other.db", "nowhere").code == 1


def test_an_exported_folder_is_no_image_folder(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    run("export", "k.db", "copy")
    refused = run("add", "other.db", "copy", "--namespace", "ward", "--embed", "pixels")
    assert (refused.code, "hint: run bottega import K.db copy" in refused.err) == (1, True)
    assert not Path("other.db").exists()


def execute(statement: str) -> None:
    connection = sqlite3.connect("k.db")
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_export_reports_damaged_examples_and_writes_the_rest(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    execute("UPDATE images SET data = x'00' WHERE rowid = 1")
    first = ids(run, "k.db")[0]
    done = run("export", "k.db", "copy")
    assert (done.code, "11 examples written to copy, 1 skipped" in done.out) == (1, True)
    assert f"skipped: example {first} is damaged: the bytes of image" in done.err
    listed = run("export", "k.db", "other", "--json")
    assert isinstance(listed.json, dict)
    assert (listed.code, listed.json["examples"]) == (1, 11)
    assert first in listed.json["skipped"][0]["reason"]


def test_deep_verify_compares_vectors_with_the_embedder(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    another = "(SELECT vector, checksum FROM vectors WHERE key = 4)"
    execute(f"UPDATE vectors SET (vector, checksum) = {another} WHERE key = 3")
    assert run("verify", "k.db").code == 0
    wrong = run("verify", "k.db", "--deep")
    report = "WRONG: 1 vector 'default' unlike those of the embedder"
    assert (wrong.code, report in wrong.out) == (1, True)
    assert f"embedder: of {ids(run, 'k.db')[2]}\n" in wrong.out
    assert "bottega verify k.db --deep --repair rebuilds" in wrong.err
    assert run("verify", "k.db", "--deep", "--repair").code == 0
    assert run("verify", "k.db", "--deep").code == 0


def test_verify_detects_a_zeroed_vector_without_the_embedder(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    execute("UPDATE vectors SET vector = zeroblob(length(vector)) WHERE key = 3")
    wrong = run("verify", "k.db")
    damaged = f"WRONG: 1 vector 'default' missing or damaged: of {ids(run, 'k.db')[2]}"
    assert (wrong.code, damaged in wrong.out) == (1, True)
    assert run("verify", "k.db", "--repair").code == 0
    assert run("verify", "k.db").code == 0


def test_verify_reports_and_repairs(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    assert "sound" in run("verify", "k.db").out
    execute("DELETE FROM vectors WHERE key = 3")
    wrong = run("verify", "k.db")
    assert (wrong.code, "WRONG: 1 vector " in wrong.out) == (1, True)
    assert "bottega verify k.db --repair rebuilds" in wrong.err
    repaired = run("verify", "k.db", "--repair", "--json")
    assert isinstance(repaired.json, dict)
    assert (repaired.code, repaired.json["sound"]) == (0, True)
    assert run("verify", "k.db").code == 0


def test_reindex_changes_the_embedder(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    done = run("reindex", "k.db", "--embed", "bundled", "--json").json
    assert isinstance(done, dict)
    assert (done["embedded"], done["view"]) == (12, "default")
    assert run("add", "k.db", pets, "--json").json == {
        "new": 0,
        "duplicates": 12,
        "skipped": [],
        "examples": 12,
    }
    looks = run("reindex", "k.db", "--embed", "pixels", "--by", "looks")
    assert (looks.code, looks.out) == (0, "12 examples embedded by pixels as looks\n")
    stats = run("stats", "k.db", "--json").json
    assert isinstance(stats, dict)
    assert set(stats["views"]) == {"default", "looks"}


def test_an_interrupted_reindex_reports_its_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f'{{"question": "question {i}", "answer": "x"}}' for i in range(100)]
    Path("questions.jsonl").write_text("\n".join(rows))
    run("add", "k.db", "questions.jsonl", "--embed", "words")
    embed, batches = TokenEmbedder.embed, []

    def interrupted(self: TokenEmbedder, queries: Sequence[Query]) -> Vectors:
        batches.append(len(queries))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return embed(self, queries)

    monkeypatch.setattr(TokenEmbedder, "embed", interrupted)
    command = ("reindex", "k.db", "--embed", "words", "--by", "text")
    stopped = run(*command)
    assert stopped.code == 130
    kept = "k.db keeps new vectors of 64 of 100 examples; repeat the command to resume\n"
    assert stopped.err == f"interrupted: {kept}"
    batches[1:] = []
    again = run(*command)
    assert (again.code, "vectors of 64 of 100" in again.err) == (130, True)
    assert "36 examples embedded" in run(*command).out


def test_verify_reports_views_without_an_embedder(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    with KnowledgeBase.open("k.db", None, create=False) as kb:
        kb.reindex("answer", View(SeededEmbedder(), lambda example: Query(example.answer)))
    execute("UPDATE vectors SET vector = zeroblob(length(vector)) WHERE key = 3 AND view = 1")
    done = run("verify", "k.db", "--deep", "--repair")
    assert done.code == 1
    assert "repaired: 1 vector 'default' missing or damaged" in done.out
    assert "WRONG: vectors 'answer' cannot be compared without their embedder" in done.out
