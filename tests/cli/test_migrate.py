from __future__ import annotations

from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase, PixelEmbedder, load_image_folder
from bottega.knowledge.base_copy import BaseCopy
from tests.cli.conftest import Run


@pytest.fixture
def filled(run: Run, pets: Path) -> None:
    with KnowledgeBase.open("k.db", PixelEmbedder()) as kb:
        kb.add(load_image_folder(pets))


@pytest.mark.usefixtures("filled")
def test_migrate_to_postgres_and_back(
    run: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = run("migrate", "k.db", database)
    assert (rejected.code, "secret" in rejected.err) == (2, False)
    monkeypatch.setenv("PGPASSWORD", "secret")
    database = database.replace(":secret@", "@")
    there = run("migrate", "k.db", database)
    assert (there.code, "12 examples written to postgresql://127.0.0.1" in there.out) == (0, True)
    back = run("migrate", database, "copy.db", "--json").json
    assert isinstance(back, dict)
    assert (back["equal"], back["written"], back["to"]) == (True, 12, "copy.db")
    assert {part["name"]: part["count"] for part in back["parts"]} == {
        "examples": 12,
        "images": 12,
        "vectors": 12,
        "changes": 12,
        "views": 1,
        "settings": 0,
    }
    assert all(part["digest"][:16] in there.out for part in back["parts"])
    assert run("ls", "k.db", "--json").json == run("ls", "copy.db", "--json").json
    again = run("migrate", "k.db", database)
    assert (again.code, "contains a knowledge base\n hint: set TO" in again.err) == (1, True)


@pytest.mark.usefixtures("filled")
def test_migrate_reports_differences(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = BaseCopy.finish

    def change_and_finish(copy: BaseCopy, *arguments: object) -> object:
        with KnowledgeBase.open("k.db", None) as kb:
            kb.delete(kb.ids()[:1])
        return finish(copy, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BaseCopy, "finish", change_and_finish)
    found = run("migrate", "k.db", "copy.db")
    assert (found.code, "DIFFERENT" in found.out) == (1, True)
    assert "error: copy.db differs from k.db: examples differ: row 1;" in found.err
    assert not Path("copy.db").exists()
    monkeypatch.setattr(BaseCopy, "finish", finish)
    assert run("migrate", "k.db", "copy.db").code == 0


@pytest.mark.usefixtures("filled")
def test_stopped_migrate_resumes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BaseCopy, "run", stop)
        stopped = run("migrate", "k.db", "copy.db")
    kept = "copy.db keeps the rows copied so far; repeat the command to resume"
    assert (stopped.code, stopped.err) == (130, f"interrupted: {kept}\n")
    assert run("migrate", "k.db", "copy.db").code == 0
