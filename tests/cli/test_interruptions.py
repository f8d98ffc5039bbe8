"""Ctrl-C: each long command says what it keeps and how to go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bottega.cli import answer, report, tune
from bottega.evaluation.methods.logistic import VectorClassifier
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.knowledge.base_copy import BaseCopy
from bottega.protocols import Vectors
from bottega.types import Query
from tests.cli.conftest import Run


def test_an_interrupted_add_says_what_it_keeps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f'{{"question": "question {i}", "answer": "x"}}' for i in range(100)]
    Path("questions.jsonl").write_text("\n".join(rows))
    embed, batches = TokenEmbedder.embed, []

    def interrupted(self: TokenEmbedder, queries: Sequence[Query]) -> Vectors:
        batches.append(len(queries))
        if len(batches) == 2:
            signal.raise_signal(signal.SIGINT)
        return embed(self, queries)

    monkeypatch.setattr(TokenEmbedder, "embed", interrupted)
    stopped = run("add", "k.db", "questions.jsonl", "--embed", "words")
    assert (stopped.code, stopped.out) == (130, "")
    kept = "interrupted: 64 of 100 examples are done; repeat the command to add the rest to k.db\n"
    assert stopped.err == kept
    again = run("add", "k.db", "questions.jsonl", "--embed", "words")
    assert "36 added, 64 were there already; k.db holds 100 examples" in again.out


def test_an_interrupted_classify_prints_what_is_done(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    classify, calls = VectorClassifier.__call__, []

    async def interrupted(self: VectorClassifier, query: Query) -> Any:
        calls.append(query)
        if len(calls) % 2 == 0:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return await classify(self, query)

    monkeypatch.setattr(VectorClassifier, "__call__", interrupted)
    monkeypatch.setattr(answer, "CONCURRENCY", 1)
    command = ("classify", "k.db", pets / "leaf", "--method", "knn", "--shots", 2)
    stopped = run(*command)
    kept = "interrupted: 1 of 4 images are classified, as printed; repeat the command with the"
    assert (stopped.code, kept in stopped.err) == (130, True), stopped.err
    assert "pets/leaf/0.png" in stopped.out and "pets/leaf/1.png" not in stopped.out
    document = run(*command, "--json").json
    assert isinstance(document, list)
    assert [Path(one["image"]).name for one in document] == ["0.png"]
    assert document[0]["valid"]


def stop(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def stop_after(steps: int) -> Callable[..., None]:
    """Return a method that is interrupted after some steps."""

    def work(*_: object, progress: Callable[[int], None], **__: object) -> None:
        progress(steps)
        raise KeyboardInterrupt

    return work


@pytest.mark.parametrize(
    ("command", "owner", "name", "work", "kept"),
    [
        (
            ("import", "new.db", "exported", "--embed", "pixels"),
            *(KnowledgeBase, "import_from", stop_after(5)),
            "5 of 12 examples are done; repeat the command to add the rest to new.db",
        ),
        (
            ("export", "k.db", "there"),
            *(KnowledgeBase, "export_to", stop_after(7)),
            "there is incomplete with 7 of 12 examples; delete it and repeat the command",
        ),
        (
            ("reindex", "k.db"),
            *(KnowledgeBase, "reindex", stop_after(7)),
            "k.db keeps new vectors of 7 of 12 examples; repeat the command to resume",
        ),
        (
            ("verify", "k.db"),
            *(KnowledgeBase, "verify", stop),
            "k.db is unchanged; repeat the command to check all of it",
        ),
        (
            ("verify", "k.db", "--deep", "--repair"),
            *(KnowledgeBase, "verify", stop),
            "k.db keeps the repairs made so far; repeat the command to check all of it",
        ),
        (
            ("tune", "k.db", "--method", "knn", "--embed", "pixels"),
            *(tune, "vote_trials", stop),
            "k.db is unchanged; repeat the command, or set a smaller --sample",
        ),
        (
            ("migrate", "k.db", "copy.db"),
            *(BaseCopy, "run", stop),
            "copy.db keeps the rows copied so far; repeat the command to resume",
        ),
        (
            ("report", "run"),
            *(report, "write_report", stop),
            "run/report may be incomplete; repeat the command",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_an_interrupted_command_says_what_it_keeps(
    run: Run,
    pets: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    owner: object,
    name: str,
    work: Callable[..., None],
    kept: str,
) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    assert run("export", "k.db", "exported").code == 0
    monkeypatch.setattr(owner, name, work)
    stopped = run(*command)
    assert (stopped.code, stopped.out, stopped.err) == (130, "", f"interrupted: {kept}\n")


def test_an_interrupted_change_of_the_embedder_resumes(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    monkeypatch.setattr(tune.Tuning, "is_change", property(lambda self: True))
    monkeypatch.setattr(tune, "_store", stop)
    stopped = run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--sample", 4)
    kept = "k.db keeps its settings until all examples are embedded again; repeat the command to"
    assert (stopped.code, kept in stopped.err) == (130, True), stopped.err
