"""Commands that take long show their progress, with the number of all steps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bottega._util.tracing import use_tracer
from bottega.cli import answer_search, knowledge, report, tune
from bottega.cli.shown_progress import CallCounter, ProgressStatus
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.types import Example, Query
from tests.cli.conftest import Run
from tests.server import Server, ok

Shown = list[tuple[str, ProgressStatus]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return the progress bars that commands show, with their titles."""
    bars: Shown = []

    @contextmanager
    def progress(
        title: str, total: int | ProgressStatus | None, *, most_calls: int | None = None
    ) -> Iterator[ProgressStatus]:
        calls = CallCounter(most_calls or 0)
        status = total if isinstance(total, ProgressStatus) else ProgressStatus(total, calls)
        bars.append((title, status))
        with use_tracer(calls):
            yield status

    for module in (knowledge, tune, report, answer_search):
        monkeypatch.setattr(module, "progress", progress)
    return bars


def steps(shown: Shown) -> list[tuple[str, int, int | None]]:
    """Return titles, finished steps and all steps, and forget them."""
    found = [(title, status.done, status.total) for title, status in shown]
    shown.clear()
    return found


def test_add_and_import_count_their_examples(run: Run, pets: Path, shown: Shown) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    assert steps(shown) == [("adding", 12, 12)]
    run("export", "k.db", "there")
    assert steps(shown) == [("exporting", 12, 12)]
    run("import", "new.db", "there", "--embed", "pixels")
    assert steps(shown) == [("adding", 12, 12)]


def test_verify_shows_each_stage(run: Run, pets: Path, shown: Shown) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    shown.clear()
    checks = [("checking images", 12, 12), ("checking examples", 12, 12)]
    checks.append(("checking vectors", 12, 12))
    assert run("verify", "k.db").code == 0
    assert steps(shown) == checks
    assert run("verify", "k.db", "--deep").code == 0
    assert steps(shown) == [*checks, ("embedding again", 12, 12)]
    with sqlite3.connect("k.db") as connection:
        connection.execute("UPDATE vectors SET vector = zeroblob(4) WHERE key <= 5")
    connection.close()
    repaired = run("verify", "k.db", "--repair")
    assert (repaired.code, "repaired: 5 vectors" in repaired.out) == (0, True), repaired.out
    assert steps(shown) == [*checks, ("repairing vectors", 5, 5), *checks]


def test_tune_without_a_model_shows_each_step(run: Run, pets: Path, shown: Shown) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    shown.clear()
    run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--sample", 6, "--dry-run")
    expected = [("embedding", 12, 12), ("comparing shots", 12, 12), ("logistic regression", 6, 6)]
    assert steps(shown) == expected


def test_report_shows_its_stages(run: Run, pets: Path, shown: Shown) -> None:
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "vote,knn", "--shots", "1,2")
    assert run(*evaluation, "--embed", "pixels", "--out", "kept").code == 0
    assert run("report", "kept").code == 0
    expected = [("reading runs", 1, 1), ("scoring methods", 4, 4), ("drawing plots", 1, 1)]
    assert steps(shown) == expected


def test_ask_counts_the_completions_of_a_search(
    run: Run, tmp_path: Path, shown: Shown, served: Server
) -> None:
    served.answers = [ok("red", "red", "red", "red", "red")]
    with KnowledgeBase.open(str(tmp_path / "k.db"), embed=TokenEmbedder.bundled()) as base:
        base.add(Example(Query(f"Which colour has ball {i}?"), "red") for i in range(5))
    search = ("ask", "Which colour?", "--kb", "k.db", "--model", "openai:m", "--search", "rcts")
    done = run(*search, "--search-calls", 20)
    assert done.code == 0, done.err
    [(title, status)] = shown
    assert (title, status.calls.limit) == ("searching", 20)
    assert 0 < status.calls.count <= 20
