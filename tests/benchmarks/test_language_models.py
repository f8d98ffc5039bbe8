"""Tests of the tasks, streams and pooled results of the language model experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import language_model_results as results
from benchmarks import language_models as tasks
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.generation import ScriptedGenerator
from bottega.types import Example, Message, Prompt, Query
from tests.knowledge.doubles import SeededEmbedder


def test_questions_have_their_coarse_types(tmp_path: Path) -> None:
    (tmp_path / "train_5500.label").write_text("NUM:dist How far is it , Bob 's house ?\n")
    (tmp_path / "TREC_10.label").write_bytes(b"HUM:ind Who is Zo\xeb ?\n")
    assert list(tasks.questions(tmp_path)) == [
        ("How far is it, Bob's house?", "number"),
        ("Who is Zoë?", "person"),
    ]


def test_headlines_lose_agency_and_markup(tmp_path: Path) -> None:
    file = tmp_path / "test.csv"
    file.write_text(
        '"3","Aides want  #36;50M (AP)","x"\n"2","AT&amp;T &lt;b&gt;...&lt;/b&gt; wins","x"\n'
    )
    assert list(tasks.news(file)) == [
        ("Aides want $50M", "business"),
        ("AT&T ... wins", "sports"),
    ]


def test_evaluated_texts_are_in_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TRAIN", 20)
    monkeypatch.setattr(tasks, "TEST", 5)
    rows = [(f"this is text {i}", "odd" if i % 2 else "even") for i in range(50)]
    tasks.write_parts("t", [*rows, ("too short", "even"), ("long " * 21, "odd")], tmp_path)
    lines_of = {json.dumps({"question": text, "labels": [label]}) for text, label in rows}
    files = {path: path.read_text().splitlines() for path in tmp_path.glob("t-*/*.jsonl")}
    assert {path.parent.name for path in files} == {"t-dev", "t-0", "t-1", "t-2"}
    for path, lines in files.items():
        assert len(set(lines)) == (20 if path.stem == "train" else 5)
        assert set(lines) <= lines_of
        if path.stem == "test":
            others = [line for other, more in files.items() if other != path for line in more]
            assert set(lines).isdisjoint(others)


def stream_data() -> Benchmark:
    items = [Example(Query(f"text {i}", id=f"item {i}"), "ab"[i % 2]) for i in range(30)]
    return labelled_benchmark("t", items, items)


async def test_stream_shows_cached_answers_of_a_perfect_master() -> None:
    def first_answer(prompt: Prompt) -> str:
        answers = [m.parts[0] for m in prompt.messages if m.role == "assistant"]
        return str(answers[0]) if answers else "none"

    data, model = stream_data(), ScriptedGenerator(first_answer)
    ours, theirs = await results.run_stream(data, model, SeededEmbedder(), 0.5, seed=0)
    apprentice = ours.scores(results.APPRENTICE)
    assert 5 < len(apprentice) < 25
    assert all(one.score == 1 for one in ours.scored if one.tier == "master")
    assert 0 < sum(apprentice.values()) < len(apprentice)
    shown = [len(call.prompt.messages) // 2 for call in model.calls]
    assert shown[-1] == results.SHOTS
    assert len(theirs.scores()) == 30
    assert all(theirs.scores()[one.index] == 1 for one in ours.scored if one.tier == "master")


async def test_gold_has_no_label_for_another_question() -> None:
    gold = results.GoldGenerator(stream_data())
    with pytest.raises(KeyError):
        await gold.generate(Prompt((Message("user", ("another text",)),)), results.SAMPLING)
