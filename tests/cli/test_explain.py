from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.image import Image
from bottega.knowledge import KnowledgeBase
from bottega.recording import TraceStore
from bottega.types import Answer, Candidate, Query, Trace
from tests.builders import candidates, search_tree, searched
from tests.cli.conftest import Run
from tests.recording.test_traces import trace


def record(recorded: Trace) -> None:
    with closing(TraceStore.open("traces.db")) as store:
        asyncio.run(store(recorded))


@pytest.fixture
def pets_searched(run: Run, pets: Path) -> Trace:
    """Record a search over the examples of pets.db, and return its trace."""
    assert run("add", "pets.db", pets).code == 0
    with KnowledgeBase.open("pets.db", embed=None) as knowledge:
        retrieved = [Candidate(example, 0.9) for example in list(knowledge)[::2]]
    query = Query("Which colour?", (Image.open("query.jpg"),))
    trace_of_search = searched(search_tree(retrieved, seed=2), query)
    record(trace_of_search)
    return trace_of_search


def test_the_tree_is_printed_with_the_chosen_path(run: Run, pets_searched: Trace) -> None:
    done = run("explain", "abc")
    assert done.code == 0
    assert "ended after its rollouts; 81 requests, 162 completions" in done.out
    assert sum("○" in line for line in done.out.splitlines()) == 40 - 4
    chosen = [line for line in done.out.splitlines() if "● " in line and "Q" in line]
    assert "no demonstrations" in chosen[0]
    for line, candidate in zip(chosen[1:], pets_searched.candidates, strict=True):
        assert f"● {candidate.example.answer}" in line
    assert f"→ {pets_searched.answer.text}  (self " in chosen[-1]
    assert run("log", "abc123").err == "show the search with bottega explain abc123\n"
    given = run("log", "abc123", "--traces", "traces.db").err
    assert given == "show the search with bottega explain abc123 --traces traces.db\n"
    missing = run("explain", "none", "--traces", "traces.db").err
    assert "run bottega log --traces traces.db for the ids" in missing


def test_the_page_has_the_images_of_the_knowledge_base(run: Run, pets_searched: Trace) -> None:
    done = run("explain", "abc123", "--out", "t.html", "--kb", "pets.db", "--image", "query.jpg")
    assert (done.code, done.err) == (0, "wrote t.html\n")
    page = Path("t.html").read_text("utf-8")
    assert "not drawn" not in page
    assert "no picture" not in page
    assert page.count("data:image/") == 40 + 1 + 3


@pytest.mark.parametrize("delete", [True, False])
def test_missing_images_are_reported(run: Run, pets_searched: Trace, delete: bool) -> None:
    with KnowledgeBase.open("pets.db", embed=None) as knowledge:
        knowledge.delete([str(shown.example.id) for shown in pets_searched.candidates])
    source = ("--kb", "pets.db") if delete else ()
    assert run("explain", "abc123", "--out", "t.html", *source).code == 0
    page = Path("t.html").read_text("utf-8")
    assert f"{4 if delete else 7} images are missing" in page
    assert (
        "the traces and pets.db lack them" if delete else "set --kb to a knowledge base"
    ) in page
    assert "set --image to the image of the question" in page if delete else "--image to" in page
    both = ("--kb", "pets.db", "--image", "query.jpg")
    assert run("explain", "abc123", "--out", "t.html", *both).code == 0
    assert "--image to" not in Path("t.html").read_text("utf-8")


def test_a_trace_without_a_search_is_printed_as_in_log(run: Run) -> None:
    record(trace())
    done = run("explain", "abc123", "--out", "t.html")
    assert done.out == run("log", "abc123").out
    assert "No search was used" in Path("t.html").read_text("utf-8")


def test_json_holds_the_full_tree(run: Run, pets_searched: Trace) -> None:
    done = run("explain", "abc123", "--json")
    assert isinstance(done.json, dict)
    assert pets_searched.tree is not None
    assert done.json["tree"]["path"] == list(pets_searched.tree.path)
    assert len(done.json["tree"]["demonstrations"]) == 6


def test_answers_are_escaped_for_the_terminal(run: Run) -> None:
    tree = search_tree(candidates("a\x1b[2J", "[bold]b[/bold]", "c"), depth=1)
    root = replace(tree.root, answer=Answer("x\x1b]0;owned\x07\n\ny"))
    record(searched(replace(tree, root=root), Query("?")))
    out = run("explain", "abc123").out
    assert "\x1b" not in out
    assert "[bold]b[/bold]" in out
    assert sum("○" in line for line in out.splitlines()) == 2


def test_invalid_requests_are_reported(run: Run, pets_searched: Trace, pets: Path) -> None:
    page = ("--out", "t.html")
    cases = [
        (1, "bottega log", ("nothing",)),
        (2, "--out FILE.html", ("abc123", "--kb", "pets.db")),
        (2, "the original file", ("abc123", *page, "--image", pets / "ruby" / "0.png")),
        (1, "bottega add", ("abc123", *page, "--kb", "absent.db")),
        (1, "t.html", ("abc123", "--out", "absent/t.html")),
    ]
    for code, words, arguments in cases:
        done = run("explain", *arguments)
        assert done.code == code, arguments
        assert words in done.err
    with KnowledgeBase.open("pets.db", embed=None, namespace="") as knowledge:
        knowledge.delete(knowledge.ids())
    assert "is empty" in run("explain", "abc123", *page, "--kb", "pets.db").err
