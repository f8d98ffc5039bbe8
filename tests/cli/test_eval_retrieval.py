"""Retrieval methods and searches of `bottega eval`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import orjson
import pytest
from PIL import Image

from tests.cli.conftest import Run
from tests.server import Server, ok


def test_eval_of_facts_reads_passages_by_default(run: Run, served: Server) -> None:
    served.answers = [ok("who knows")]
    done = run(
        "eval", "facts:episodes=1,queries=2", "--model", "openai:m", "--shots", 2, "--json", "f"
    )
    assert done.code == 0
    rows = orjson.loads(Path("f").read_bytes())["results"]
    assert [(row["method"], row["n"]) for row in rows] == [
        ("zero-shot", 2),
        ("random", 2),
        ("oracle", 2),
    ]


@pytest.mark.parametrize("retrieve", ["text", "dual", "keywords", "bm25", "hashtag"])
def test_eval_retrieves_examples_by_text(run: Run, served: Server, retrieve: str) -> None:
    served.answers = [ok("red")]
    task = ("eval", "attributes:examples=30,queries=5", "--model", "openai:m", "--embed", "pixels")
    method = ("--methods", "visual-rag,swap-question", "--shots", 3, "--json", "f")
    done = run(*task, *method, "--retrieve", retrieve)
    assert done.code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert (document["retrieve"], document["labels"]) == (retrieve, 30)
    assert [row["n"] for row in document["results"]] == [5, 5]


@pytest.mark.parametrize("retrieve", ["keywords", "bm25", "hashtag"])
def test_eval_retrieves_passages_within_their_episode(
    run: Run, served: Server, retrieve: str
) -> None:
    served.answers = [ok("who knows")]
    task = ("eval", "facts:episodes=2,queries=3", "--model", "openai:m", "--embed", "pixels")
    done = run(
        *task, "--methods", "visual-rag", "--retrieve", retrieve, "--shots", 2, "--json", "f"
    )
    assert done.code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["n"], row["failed"]) == (6, 0)


@pytest.mark.parametrize(
    "task",
    [
        "attributes:examples=30,queries=4",
        "facts:episodes=2,queries=2",
        "rules:episodes=2,queries=2",
    ],
)
def test_eval_retrieves_by_late_interaction(run: Run, served: Server, task: str) -> None:
    served.answers = [ok("red")]
    options = ("--methods", "visual-rag,rcts", "--shots", 3, "--retrieve", "hybrid", "--json", "f")
    assert run("eval", task, "--model", "openai:m", *options).code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert document["retrieve"] == "hybrid"
    assert [(row["n"], row["failed"]) for row in document["results"]] == [(4, 0), (4, 0)]


def test_the_bundled_model_searches_late_interaction_candidates(run: Run) -> None:
    options = ("--methods", "rcts", "--shots", 3, "--rollouts", 2, "--retrieve", "hybrid")
    assert run("eval", "attributes:examples=30,queries=2", *options, "--json", "f").code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["n"], row["failed"], row["calls"] >= 6) == (2, 0, True)


def test_search_uses_candidates_of_a_late_interaction_checkpoint(
    run: Run, served: Server, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tests.knowledge import tiny_models

    folder = tiny_models.save_flmr(tmp_path / "flmr")
    served.answers = [ok("red")]
    task = (
        "eval",
        "attributes:examples=30,queries=2",
        "--model",
        "openai:m",
        "--methods",
        "top-k,rcts",
    )
    more = ("--shots", 3, "--rollouts", 2, "--embed", f"flmr:{folder}")
    done = run(*task, *more, "--retrieve", "hybrid", "--json", "f")
    assert done.code == 0, done.err
    rows = orjson.loads(Path("f").read_bytes())["results"]
    assert [(row["n"], row["failed"]) for row in rows] == [(2, 0), (2, 0)]
    assert "(retrieve or --retrieve) to hybrid" in run(*task, *more).err


def test_methods_without_retrieval_ignore_the_retriever(run: Run, served: Server) -> None:
    served.answers = [ok("3")]
    task = ("eval", "rules:episodes=1,queries=2", "--model", "openai:m", "--methods", "random")
    for retrieve in ("hybrid", "hashtag"):
        assert run(*task, "--shots", 1, "--retrieve", retrieve).code == 0


def test_eval_compares_search_with_its_baselines(run: Run, served: Server) -> None:
    served.answers = [ok("Answer: 3")]
    task = (
        "eval",
        "rules:episodes=2,examples=4,queries=2",
        "--model",
        "openai:m",
        "--embed",
        "pixels",
    )
    names = ("top-k", "rcts", "rcts-random", "rcts-best-of-n", "majority")
    more = ("--methods", ",".join(names), "--shots", 2, "--rollouts", 3, "--json", "f")
    done = run(*task, *more)
    assert done.code == 0, done.out
    document = orjson.loads(Path("f").read_bytes())
    rows = {row["method"]: row for row in document["results"]}
    assert tuple(rows) == names
    baselines = [row["against"] for row in document["paired"] if row["method"] == "rcts"]
    assert baselines == ["top-k", "majority", "rcts-random", "rcts-best-of-n"]
    assert rows["majority"]["calls"] == 4 * (1 + 3 * 11)
    assert all(4 <= rows[name]["calls"] <= 4 * 34 for name in names[1:])
    assert all(row["n"] == 4 and row["prompt_tokens"] for row in rows.values())


def test_rerank_covers_labels(run: Run, tmp_path: Path) -> None:
    """Of the nearest images two have the same label; `cover` shows one of each."""
    (tmp_path / "images").mkdir()
    rows = []
    for number, (shade, labels) in enumerate(
        [(100, "red"), (101, "red"), (104, "blue"), (105, "blue"), (102, "red")]
    ):
        Image.new("RGB", (16, 16), (shade, shade, shade)).save(tmp_path / f"images/{number}.png")
        rows.append({"image": f"images/{number}.png", "answer": labels, "question": "Which?"})
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[:4])))
    (tmp_path / "test.jsonl").write_bytes(orjson.dumps(rows[4]))
    shown = {}
    for rerank in ("none", "cover", "mmr"):
        done = run(
            *("eval", f"jsonl:{tmp_path}", "--embed", "pixels", "--methods", "visual-rag"),
            *("--shots", 2, "--rerank", rerank, "--out", rerank),
        )
        assert done.code == 0, done.err
        [(trace,)] = sqlite3.connect(f"{rerank}/run.db").execute("SELECT trace FROM answers")
        shown[rerank] = sorted(one["answer"] for one in orjson.loads(trace)["demonstrations"])
    assert (shown["none"], shown["cover"]) == (["red", "red"], ["blue", "red"])
    assert len(shown["mmr"]) == 2


def test_passages_are_not_counted_as_labelled_examples(run: Run) -> None:
    planned = run("eval", "facts:queries=2,episodes=1", "--limit", "2", "--dry-run")
    assert (planned.code, "2 items, 144 passages, no labels" in planned.out) == (0, True), (
        planned.out
    )


def test_rationales_that_are_hidden_give_no_reward(run: Run) -> None:
    command = ("eval", "rules:episodes=1", "--methods", "rcts", "--reward", "self", "--dry-run")
    refused = run(*command, "--no-rationales")
    assert (refused.code, "the reward self needs rationales" in refused.err) == (2, True)


def test_searches_show_three_demonstrations(run: Run) -> None:
    command = ("eval", "codes:notebooks=5", "--limit", 2, "--rollouts", 1, "--json", "f")
    assert run(*command, "--methods", "top-k,rcts,majority").code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert {row["shots"] for row in document["results"]} == {3}
    shown = document["shown"]
    assert shown["rcts"]["reward"] == "ensemble" and shown["rcts"]["variant"] == "paper"
    assert shown["majority"]["samples"] == str(1 + 1 + 15)
