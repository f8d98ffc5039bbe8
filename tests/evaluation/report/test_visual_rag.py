"""Tests of comparisons over several benchmarks, and of the demonstrations needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.report.runs import Item, RecordedAnswer, StoredRun
from bottega.evaluation.report.sections import Section, sections
from bottega.evaluation.report.visual_rag_figures import average_rows, efficiency
from bottega.types import Answer, Example, Query

N = 200


def run(benchmark: str, right: Mapping[tuple[str, int], int]) -> StoredRun:
    """Return a run of `N` items, of which each method answers the first `right` correctly."""
    examples = [Example(Query(f"{benchmark} {i}", id=str(i)), "a") for i in range(N)]
    answers = {
        key: {
            i: RecordedAnswer(
                ScoredAnswer(i, one, Answer("a", labels=("a",)), (float(i < count),), "t", 1),
                0.1,
                "x",
                (),
                (),
            )
            for i, one in enumerate(examples)
        }
        for key, count in right.items()
    }
    settings = {"benchmark": benchmark, "metrics": ["accuracy"], "model": "m", "seed": 0}
    items = tuple(Item(example, ()) for example in examples)
    return StoredRun(Path(benchmark), settings, items, answers, {}, {})


def section(right: Mapping[tuple[str, int], int]) -> Section:
    return sections({"one": run("one", right)})[0]


RANDOM = {("random", 5): 100, ("random", 50): 160, ("random", 100): 160}


def test_fewest_shots_that_match_the_best_many_shot_result() -> None:
    retrieved = {("visual-rag", 1): 120, ("visual-rag", 5): 164, ("visual-rag", 20): 180}
    [found] = efficiency(section({**RANDOM, **retrieved}))
    assert (found.method, found.many_shot, found.matched) == ("visual-rag", "random", True)
    assert (found.shots, found.many_shots) == (5, 50)
    assert found.ratio.value == pytest.approx(0.1)
    assert found.gain.value == pytest.approx(4 / N)
    assert found.ratio.low <= 0.1 <= found.ratio.high
    assert found.gain.low <= 4 / N <= found.gain.high


def test_closest_result_without_a_match() -> None:
    [found] = efficiency(section({**RANDOM, ("visual-rag", 5): 90, ("visual-rag", 10): 150}))
    assert (found.shots, found.many_shots, found.matched) == (10, 50, False)
    assert found.gain.value == pytest.approx(-10 / N)


def test_average_needs_every_benchmark() -> None:
    first = run("one", {("zero-shot", 0): 20, ("visual-rag", 5): 100, ("visual-rag", 10): 140})
    second = run("two", {("zero-shot", 0): 60, ("visual-rag", 5): 180, ("knn", 5): 100})
    third = run("three", {("zero-shot", 0): 100, ("knn", 5): 100})
    rows = average_rows(sections({"a": first, "b": second, "c": third}))
    assert {row.method: row.average for row in rows} == {
        "zero-shot": pytest.approx(0.3),
        "visual-rag": None,
        "knn": None,
    }
    [best] = [row.best for row in rows if row.method == "visual-rag"]
    assert best == (0.7, 0.9, None)
    assert average_rows(sections({"a": first})) == []
