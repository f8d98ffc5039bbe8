from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega import KnowledgeBase, PixelEmbedder, Query, TokenEmbedder, load_image_folder
from bottega.errors import EmbedderMismatchError
from bottega.knowledge import View
from bottega.types import Example
from tests.cli.conftest import Run
from tests.knowledge.doubles import SeededEmbedder

QUIET = ("--traces", "none", "--json")


def answer_query(example: Example) -> Query:
    return Query(example.answer)


@pytest.fixture
def file(pets: Path, tmp_path: Path) -> Path:
    """Return a file of three views: image, answer, and one whose embedder has no option."""
    views = {
        "image": View(PixelEmbedder()),
        "answer": View(TokenEmbedder.bundled(), to_query=answer_query),
        "odd": View(SeededEmbedder("odd-1")),
    }
    with KnowledgeBase.open(tmp_path / "k.db", views) as knowledge:
        knowledge.add(load_image_folder(pets))
    return tmp_path / "k.db"


def record(json: object) -> dict[str, Any]:
    assert isinstance(json, dict)
    return json


def shown(json: object) -> set[str]:
    return {example["answer"] for example in record(json)["demonstrations"]}


def test_each_view_retrieves_by_its_own_query(run: Run, file: Path) -> None:
    by_answer = ("ask", "ruby", "--kb", file, "--by", "answer", "--shots", 4, *QUIET)
    assert shown(run(*by_answer).json) == {"ruby"}
    answers = run("classify", file, "query.jpg", "--by", "image", "--shots", 4, *QUIET).json
    assert isinstance(answers, list)
    assert answers[0]["answer"] == "leaf"


@pytest.mark.parametrize("by", [(), ("--by", "smell")])
def test_a_missing_or_wrong_view_is_reported(run: Run, file: Path, by: tuple[str, ...]) -> None:
    for command in (("classify", file, "query.jpg"), ("ask", "what?", "--kb", file)):
        failed = run(*command, *by)
        assert failed.code == 2
        assert "image, answer, odd" in failed.err
        assert "--by" in failed.err


def test_an_unnamed_embedder_is_reported(run: Run, file: Path) -> None:
    failed = run("ask", "what?", "--kb", file, "--by", "odd")
    assert failed.code == 1
    assert "'odd-1'" in failed.err
    assert "--embed" in failed.err
    clash = run("ask", "what?", "--kb", file, "--by", "odd", "--embed", "pixels")
    assert "'odd-1'" in clash.err


def test_another_embedder_gets_a_hint(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    for command in (
        ("classify", "k.db", "query.jpg"),
        ("add", "k.db", pets),
        ("verify", "k.db", "--deep"),
    ):
        failed = run(*command, "--embed", "bundled")
        assert failed.code == 1
        assert "hint: set --embed pixels, or leave it out;" in failed.err
        assert "bottega reindex k.db --embed bundled" in failed.err


def test_python_names_the_embedders_of_a_mismatch(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    with pytest.raises(EmbedderMismatchError) as raised:
        KnowledgeBase.open("k.db", TokenEmbedder.bundled())
    hint = "omit embed= to open it with pixels, or build a new file with words"
    assert raised.value.hint == hint
    with KnowledgeBase.open("k.db") as opened:
        assert opened.embedder().fingerprint == raised.value.stored


def test_stats_list_every_view(run: Run, file: Path) -> None:
    views = record(run("stats", file, "--json").json)["views"]
    assert list(views) == ["image", "answer", "odd"]
    assert views["odd"] == {"embedder": "odd-1", "fingerprint": "odd-1", "dimension": 8}
    assert views["answer"]["embedder"] == "words"
    printed = run("stats", file).out
    for view in views.values():
        assert view["embedder"] in printed and str(view["dimension"]) in printed


def test_views_defined_in_python_are_not_rebuilt(run: Run, pets: Path, file: Path) -> None:
    run("export", file, "copy")
    before = run("stats", file, "--json").json
    for command in (
        ("add", file, pets),
        ("import", file, "copy"),
        ("add", file, pets, "--embed", "pixels"),
    ):
        failed = run(*command)
        assert failed.code == 1
        assert "image, answer, odd" in failed.err
        assert "from Python" in failed.err
    for option in ((), ("--embed", "words"), ("--embed", "pixels")):
        failed = run("reindex", file, "--by", "answer", *option)
        assert failed.code == 1
        assert "new name" in failed.err
    assert run("reindex", file).code == 2
    assert run("stats", file, "--json").json == before


def test_views_created_by_reindex_are_filled_by_add(run: Run, pets: Path) -> None:
    (pets / "ruby").rename("ruby")
    run("add", "k.db", pets, "--embed", "pixels")
    assert (
        record(run("reindex", "k.db", "--embed", "words", "--by", "text", "--json").json)[
            "embedded"
        ]
        == 8
    )
    Path("more").mkdir()
    Path("ruby").rename("more/ruby")
    assert record(run("add", "k.db", "more", "--json").json)["new"] == 4
    assert run("verify", "k.db").code == 0
    for by in ((), ("--by", "text")):
        assert (
            run("ask", "What is in the image?", "-i", "query.jpg", "--kb", "k.db", *by, *QUIET).code
            == 0
        )
    with KnowledgeBase.open("k.db", {"text": View(TokenEmbedder.bundled())}) as knowledge:
        assert len(knowledge.vectors(knowledge.ids(), by="text")) == 12


def test_a_view_redefined_in_python_is_not_filled_by_add(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    run("reindex", "k.db", "--embed", "pixels", "--by", "text")
    with KnowledgeBase.open("k.db", None) as knowledge:
        knowledge.reindex("text", View(TokenEmbedder.bundled(), to_query=answer_query))
    assert "by Python code: text" in run("add", "k.db", pets).err


def test_an_empty_view_name_is_rejected(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    failed = run("reindex", "k.db", "--by", "", "--embed", "words")  # an empty shell variable
    assert failed.code == 2
    assert "view name is invalid" in failed.err
    assert record(run("stats", "k.db", "--json").json)["embedder"] == "pixels"


def test_a_binary_note_is_reported_as_damage(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    with closing(sqlite3.connect("k.db")) as connection, connection:
        connection.execute("UPDATE views SET fingerprint = 'of a model'")
        connection.execute("UPDATE notes SET value = x'ff'")
    connection.close()
    failed = run("classify", "k.db", "query.jpg")
    assert failed.code == 1
    assert "is damaged" in failed.err


def test_a_default_view_defined_in_python_is_not_rebuilt(run: Run, pets: Path) -> None:
    view = View(TokenEmbedder.bundled(), to_query=answer_query)
    with KnowledgeBase.open("k.db", {"default": view}) as knowledge:
        knowledge.add(load_image_folder(pets))
    for command in (
        ("add", "k.db", pets, "--namespace", "new"),
        ("verify", "k.db", "--repair", "--embed", "words"),
    ):
        failed = run(*command)
        assert failed.code == 1
        assert "defined by Python code" in failed.err
    assert run("verify", "k.db", "--repair").code == 0
    with closing(sqlite3.connect("k.db")) as connection, connection:
        connection.execute("DELETE FROM vectors WHERE key = 9")
    connection.close()
    assert "only with the embedder" in run("verify", "k.db", "--repair").out
    assert run("classify", "k.db", "query.jpg", "--shots", 1, *QUIET).code == 0


def test_reindex_without_a_view_rebuilds_the_default(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    run("reindex", "k.db", "--embed", "words", "--by", "text")
    assert record(run("reindex", "k.db", "--embed", "bundled", "--json").json)["view"] == "default"
    assert record(run("reindex", "k.db", "--json").json) == {
        "view": "default",
        "embedded": 0,
        "embedder": record(run("stats", "k.db", "--json").json)["views"]["default"]["embedder"],
    }


def test_repair_rebuilds_its_own_vectors_and_names_the_others(run: Run, file: Path) -> None:
    assert (
        "by Python code: image, answer, odd"
        in run("verify", file, "--repair", "--embed", "pixels").err
    )
    run("reindex", file, "--embed", "pixels", "--by", "looks")
    connection = sqlite3.connect(file)
    connection.execute("DELETE FROM vectors WHERE key = 3")
    connection.commit()
    connection.close()
    repaired = run("verify", file, "--repair")
    assert repaired.code == 1
    assert "repaired: 1 vector 'looks'" in repaired.out
    assert "WRONG: 1 vector 'answer' missing or damaged" in repaired.out
    assert "; repaired only with the embedder" in repaired.out


def test_words_and_dual_are_valid_embedders(run: Run, pets: Path) -> None:
    rows = [{"text": f"What is {n}?", "answer": str(n)} for n in range(3)]
    Path("t.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    for spec, source, begins in (
        ("words", "t.jsonl", "tokens-"),
        ("dual", pets, "dual (tower-"),
    ):
        run("add", f"{spec}.db", source, "--embed", spec)
        stats = record(run("stats", f"{spec}.db", "--json").json)
        assert stats["embedder"] == stats["views"]["default"]["embedder"] == spec
        assert stats["views"]["default"]["fingerprint"].startswith(begins)
        assert run("ask", "What is it?", "--kb", f"{spec}.db", *QUIET).code == 0


def test_text_retrieval_uses_a_text_embedder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bottega.evaluation.methods.retrieval import open_retrieval
    from tests.knowledge import tiny_models

    folder = tiny_models.save_clip(tmp_path / "clip")
    assert open_retrieval("text", f"{folder}:text").embedder.fingerprint.startswith("clip@")
    assert open_retrieval("text", f"{folder}:image").embedder.fingerprint.startswith("tokens-")


def test_an_average_compares_images_with_texts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bottega.evaluation.methods.retrieval import open_retrieval
    from tests.knowledge import tiny_models

    folder = tiny_models.save_clip(tmp_path / "clip")
    for mode, name in (("average", "average-unit unit"), ("raw-average", "average-raw raw")):
        dual = open_retrieval("dual", f"{folder}:{mode}")
        assert dual.embedder.fingerprint.endswith(name)
        assert dual.image is not None and dual.image.fingerprint.endswith("image unit")
        assert dual.text is not None and dual.text.fingerprint.endswith("text unit")
    words = open_retrieval("dual", f"{folder}:image")
    assert words.embedder.dimension > dual.embedder.dimension  # a concatenation
