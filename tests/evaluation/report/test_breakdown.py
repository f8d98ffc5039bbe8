from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.runs import read_run
from bottega.evaluation.report.sections import (
    MAX_GROUPS,
    Section,
    breakdowns,
    confusions,
    sections,
)
from bottega.types import Answer, Query
from tests.builders import example
from tests.evaluation.report.builders import store_run


async def answer_from(answers_by_query: dict[Query, Answer], query: Query) -> Outcome:
    return Outcome(answers_by_query[query])


async def section(folder: Path, truths: list[str], answers: list[Answer], **tags: str) -> Section:
    items = tuple(replace(example(truth, i), tags=tags) for i, truth in enumerate(truths))
    answers_by_query = {item.query: answer for item, answer in zip(items, answers, strict=True)}
    data = Benchmark("letters", (example("z", 9999),), items, tuple(dict.fromkeys(truths)))
    method = Method("vote", 1, lambda query: answer_from(answers_by_query, query))
    [one] = sections({"run": read_run(await store_run(folder, data, [method]))})
    return one


def label(text: str, valid: bool = True) -> Answer:
    return Answer(text, valid, (text,))


async def test_each_label_has_an_accuracy_with_interval(tmp_path: Path) -> None:
    result = await section(tmp_path, ["a", "a", "b", "a"], [label(x) for x in "abba"])
    [by] = breakdowns(result)
    assert (by.by, by.rest, by.more) == ("label", None, 0)
    assert [(group.name, group.items) for group in by.groups] == [("a", 3), ("b", 1)]
    [cell] = by.groups[0].cells
    assert cell is not None
    assert (cell.n, cell.score.value) == (3, 2 / 3)
    assert cell.score.low < 2 / 3 < cell.score.high


async def test_labels_over_the_limit_are_aggregated(tmp_path: Path) -> None:
    truths = [f"l{i}" for i in range(MAX_GROUPS + 5) for _ in range(2)]
    [by] = breakdowns(await section(tmp_path, truths, [label("l0")] * len(truths)))
    assert (len(by.groups), by.more) == (MAX_GROUPS, 5)
    assert by.rest is not None and by.rest.items == 10
    [cell] = by.rest.cells
    assert cell is not None
    assert (cell.n, cell.score.value) == (10, 0.0)


async def test_distinct_truths_give_no_breakdown(tmp_path: Path) -> None:
    truths = [f"t{i}" for i in range(9)]
    result = await section(tmp_path, truths, [label("t0")] * 9, subject="one", episode="3")
    assert breakdowns(result) == []
    assert confusions(result) is None


async def test_confusions_count_invalid_and_other_answers(tmp_path: Path) -> None:
    answers = [label("a"), label("b"), label("b", False), label("q"), label("b")]
    result = confusions(await section(tmp_path, ["a", "a", "a", "b", "b"], answers))
    assert result is not None
    assert result.labels == ("a", "b")
    assert result.columns == ("a", "b", "(another)", "(invalid)")
    assert result.counts == ((1, 1, 0, 1), (0, 1, 1, 0))
