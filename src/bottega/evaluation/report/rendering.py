"""One self-contained page. Its policy forbids every request, and every script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from bottega.evaluation.curves import Chart, by_cost, by_shots
from bottega.evaluation.episodes import EXCLUSION_RULE
from bottega.evaluation.page import house
from bottega.evaluation.report.breakdown import Breakdown, Confusions, breakdowns, confusions
from bottega.evaluation.report.drawing import cost_axis, cost_series, shot_series
from bottega.evaluation.report.figures import Row, Section
from bottega.evaluation.report.payload import payload
from bottega.evaluation.report.references import Reference, references

SCRIPTS = ("comparing.js", "items.js")
HERE = "bottega.evaluation.report"
MOST_ERRORS = 8
# Facts of a run that its reader asks for first.
FIRST = ("model", "seed", "prompt", "order", "retrieve", "embedder")


@dataclass(frozen=True)
class Shown:
    """A section with what is drawn and counted of it."""

    section: Section
    shots: Chart | None
    costs: Chart | None
    breakdowns: Sequence[Breakdown]
    confusions: Confusions | None
    references: Sequence[Reference]
    columns: Sequence[str]
    settings: Mapping[str, Sequence[object]]
    errors: Sequence[tuple[str, int]]

    @property
    def unfinished(self) -> list[Row]:
        return [row for row in self.section.rows if row.result.failed or row.result.missing]

    def published(self, row: Row, column: str) -> float | None:
        """What a paper has for this method, by the metric that rows are compared by."""
        return next(
            (one.value for one in self.references if one.column == column and _matches(one, row)),
            None,
        )


def render(sections: Sequence[Section], *, title: str, made: str) -> str:
    told = payload(sections)
    program = "\n".join(files(HERE).joinpath(name).read_text("utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode("ascii")
    return (
        house()
        .get_template("report/report.html")
        .render(
            title=title,
            made=made,
            rule=EXCLUSION_RULE,
            shown=[_shown(section) for section in sections],
            data=Markup(told.json.decode()),
            told=told,
            style=Markup(files(HERE).joinpath("report.css").read_text("utf-8")),
            program=Markup(program),
            digest=digest,
        )
    )


def _shown(section: Section) -> Shown:
    answered = any(row.result.value is not None for row in section.rows)
    metric = section.metric.replace("_", " ")
    published = references(section.benchmark, section.metrics)
    beside = [one for one in published if any(_matches(one, row) for row in section.rows)]
    errors = Counter(error for row in section.rows for error in row.failures.values())
    return Shown(
        section,
        by_shots(shot_series(section), f"{metric} by number of demonstrations, as in the table")
        if answered
        else None,
        by_cost(cost_series(section), f"{metric} by cost, as in the table", cost_axis(section))
        if answered
        else None,
        breakdowns(section),
        confusions(section),
        published,
        list(dict.fromkeys(one.column for one in beside)),
        _settings(section),
        errors.most_common(MOST_ERRORS),
    )


def _matches(one: Reference, row: Row) -> bool:
    return (
        row.result.method in one.ours
        and row.result.metric in one.metrics
        and one.shots in (None, row.result.shots)
    )


def _settings(section: Section) -> dict[str, list[Any]]:
    """By name, one value a run; what the section's head says already is left out."""
    runs = section.runs.values()
    names = dict.fromkeys([*FIRST, *(name for run in runs for name in run.settings)])
    said = ("benchmark", "metrics")
    return {
        name: [run.settings.get(name) for run in runs]
        for name in names
        if name not in said and any(name in run.settings for run in runs)
    }
