from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.metrics.metric import (
    Accuracy,
    MacroF1,
    labels_of,
    mcnemar,
    paired_difference,
)
from bottega.evaluation.metrics.open_answers import Answerability
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.result_tables import as_markdown
from bottega.evaluation.report.runs import StoredRun, read_run
from bottega.evaluation.report.sections import Section, sections
from bottega.evaluation.runs.paired import paired_differences
from bottega.evaluation.runs.runner import evaluate
from bottega.types import Answer, Query
from tests.builders import example
from tests.evaluation.report.builders import benchmark, simulated_answers, store_run, three_methods

DATA = benchmark(60, examples=6, side=8)


def only(**runs: StoredRun) -> Section:
    [section] = sections(runs)
    return section


async def test_rows_match_the_command_output(tmp_path: Path) -> None:
    section = only(run=read_run(await store_run(tmp_path, DATA, three_methods(DATA))))
    runs = [await evaluate(DATA, method) for method in three_methods(DATA)]
    assert len(section.rows) == len(runs)
    for row, (result, _) in zip(section.rows, runs, strict=True):
        assert replace(row.result, seconds=0) == replace(result, seconds=0)
        assert row.per_item(row.result.seconds) == pytest.approx(0.6)
    assert list(section.pairs) == paired_differences(runs)
    assert [row.title for row in section.rows] == ["zero-shot", "random 3", "top-k 3"]


async def test_differences_to_knn_of_all_runs_come_first(tmp_path: Path) -> None:
    methods = [
        Method(name, 3, simulated_answers(DATA, accuracy, 3))
        for name, accuracy in (("random", 0.5), ("visual-rag", 0.8), ("knn", 0.7))
    ]
    one, two = [read_run(await store_run(tmp_path / name, DATA, methods)) for name in "ab"]
    section = only(one=one, two=two)
    assert [(pair.method, pair.against) for pair in section.pairs[:4]] == [
        ("one: visual-rag", "one: knn"),
        ("two: visual-rag", "two: knn"),
        ("one: visual-rag", "one: random"),
        ("two: visual-rag", "two: random"),
    ]
    markdown = as_markdown([section], title="t", made="now")
    pairs = markdown.partition("Paired differences")[2].splitlines()
    assert pairs[4].startswith("| one: visual-rag | one: knn |")


async def test_macro_f1_is_computed_from_labels(tmp_path: Path) -> None:
    labels = ("a", "b", "c")
    several = [replace(example("a, b", i), labels=("a", "b")[: 1 + i % 2]) for i in range(9)]
    metrics = (MacroF1(labels), Accuracy())
    data = Benchmark("signs", tuple(several[:1]), tuple(several[1:]), labels, True, metrics=metrics)

    async def always_a(query: Query) -> Outcome:
        return Outcome(Answer("a", labels=("a",)))

    method = Method("vote", 1, always_a)
    names = [metric.name for metric in metrics]
    run = read_run(await store_run(tmp_path, data, [method], benchmark="signs", metrics=names))
    expected, _ = await evaluate(data, method)
    [row] = only(run=run).rows
    assert replace(row.result, seconds=0) == replace(expected, seconds=0)
    assert (row.model, labels_of(run.items[0].example)) == ("no model", ("a", "b"))


async def test_answerability_is_computed_from_tags_and_confidences(tmp_path: Path) -> None:
    items = tuple(
        replace(item, tags={"answerable": str(index % 3 and 1)})
        for index, item in enumerate(DATA.items)
    )
    unanswerable = {str(item.query.id) for item in items if item.tags["answerable"] == "0"}
    metrics = (Accuracy(), Answerability(unanswerable, "ap"), Answerability(unanswerable, "f1"))
    data = replace(DATA, items=items, metrics=metrics)

    async def doubting(query: Query) -> Outcome:
        doubt = int(str(query.id)[1:]) % 5
        return Outcome(Answer("unanswerable" if doubt < 2 else "dog", confidence=doubt / 5))

    method = Method("zero-shot", 0, doubting)
    names = [metric.name for metric in metrics]
    run = read_run(await store_run(tmp_path, data, [method], metrics=names))
    expected, _ = await evaluate(data, method)
    [row] = only(run=run).rows
    assert row.result.also == expected.also
    assert 0 < expected.also[0].value < 1


async def test_unknown_metric_has_no_value(tmp_path: Path) -> None:
    method = Method("top-k", 1, simulated_answers(DATA, 0.5, 1))
    run = await store_run(tmp_path, DATA, [method], metrics=["macro_something"])
    [row] = only(run=read_run(run)).rows
    assert (row.result.value, row.result.n) == (None, 60)


async def test_runs_on_equal_items_are_compared(tmp_path: Path) -> None:
    weak, strong = (Method("top-k", 2, simulated_answers(DATA, right, 2)) for right in (0.2, 0.9))
    small = read_run(await store_run(tmp_path / "small", DATA, [weak], model="small"))
    large = read_run(await store_run(tmp_path / "large", DATA, [strong], model="large"))
    section = only(small=small, large=large)
    assert [(row.title, row.model) for row in section.rows] == [
        ("small: top-k 2", "small"),
        ("large: top-k 2", "large"),
    ]
    [pair] = section.pairs
    ours, theirs = ([one.correct for one in row.scored] for row in reversed(section.rows))
    gain = paired_difference(ours, theirs)
    assert (pair.method, pair.against, pair.n) == ("large: top-k", "small: top-k", 60)
    assert (pair.value, pair.low, pair.high) == (gain.value, gain.low, gain.high)
    assert pair.p_value == mcnemar(ours, theirs)


async def test_runs_on_different_items_have_separate_sections(tmp_path: Path) -> None:
    fewer = replace(DATA, items=DATA.items[:50])
    runs = {
        name: read_run(await store_run(tmp_path / name, data, three_methods(data)[:1]))
        for name, data in (("all", DATA), ("fewer", fewer))
    }
    assert [section.item_count for section in sections(runs)] == [60, 50]


async def test_unfinished_run_counts_missing_items(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    async def stopping(query: Query) -> Outcome:
        if query == DATA.items[40].query:
            await asyncio.sleep(0.2)
            raise Stopped
        return await simulated_answers(DATA, 1.0, 1)(query)

    with pytest.raises(Stopped):
        await store_run(tmp_path, DATA, [Method("top-k", 1, stopping)])
    [row] = only(run=read_run(tmp_path)).rows
    assert 0 < row.result.missing < 60
    assert row.result.missing == 60 - row.result.n
