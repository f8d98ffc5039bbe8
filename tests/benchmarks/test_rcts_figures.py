"""Paired differences in the tables of `benchmarks/rcts.py`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rcts_figures import HEAD, SettingResults, tables
from benchmarks.rcts_plan import SETTINGS, MethodConfig
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.types import Answer, Example, Query

ITEM = Example(Query("?"), "x")


def scored(right: Sequence[int]) -> list[ScoredAnswer]:
    return [ScoredAnswer(i, ITEM, Answer("x"), (float(one),)) for i, one in enumerate(right)]


def test_a_tree_is_compared_with_the_narrow_one_and_with_early_stopping() -> None:
    measured = SettingResults(SETTINGS["codes"])
    narrow = MethodConfig("rcts", "mutual", early_stop=False)
    wide = MethodConfig("rcts", "mutual", children=20, early_stop=False)
    stopped = MethodConfig("rcts", "mutual", children=20)
    outcomes = {narrow: [1, 0, 0, 0], wide: [1, 1, 1, 0], stopped: [0, 1, 1, 0]}
    for config, right in outcomes.items():
        measured.keep(config, 0, scored(right))
    cells = {
        row[1].strip(): dict(zip(HEAD, map(str.strip, row[1:-1]), strict=True))
        for line in tables(measured).splitlines()
        if (row := line.split("|"))[0] == "" and len(row) > 2
    }
    differences = {
        name: [row[column].partition(" ")[0] for column in ("minus width 3", "minus early stop")]
        for name, row in cells.items()
        if name.startswith("rcts")
    }
    assert differences == {
        "rcts, mutual, no early stop": ["", ""],
        "rcts, mutual, children 20": ["", ""],
        "rcts, mutual, children 20, no early stop": ["+0.500", "+0.250"],
    }
