"""Report of runs: an HTML page, CSV, Markdown and plots."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bottega import __version__
from bottega.errors import MissingDependencyError, SettingError
from bottega.evaluation.charts import Chart, by_cost, by_shots
from bottega.evaluation.page import page_environment, style_sheet
from bottega.evaluation.report.payload import payload
from bottega.evaluation.report.plots import cost_axis, cost_series, plot, shots_of
from bottega.evaluation.report.references import Reference, references
from bottega.evaluation.report.runs import StoredRun, read_run
from bottega.evaluation.report.sections import (
    Breakdown,
    Confusions,
    Row,
    Section,
    breakdowns,
    confusions,
    sections,
)
from bottega.evaluation.retrieval import EXCLUSION_RULE
from bottega.image import path_text

COLUMNS = (
    *("benchmark", "run", "model", "method", "shots", "items", "n", "failed", "missing", "invalid"),
    *("metric", "value", "low", "high"),
    *("calls", "prompt_tokens", "completion_tokens", "cost_usd", "seconds_an_answer"),
)


def as_csv(sections: Sequence[Section]) -> str:
    """Return a line for each metric of each row, the main metric first."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in sections:
        for row in section.rows:
            writer.writerows(_lines(section, row))
    return buffer.getvalue()


def as_markdown(sections: Sequence[Section], *, title: str, made: str) -> str:
    parts = [f"# {title}", f"{made}. 95 % intervals in brackets. {EXCLUSION_RULE}"]
    for section in sections:
        parts += [f"## {_escaped(section.benchmark)}", f"{section.item_count:,} items."]
        parts.append(_table(*_figures(section)))
        if section.pairs:
            head = ("method", "baseline", "shots", "n", "difference", "p")
            pairs = [
                (
                    one.method,
                    one.against,
                    one.shots,
                    one.n,
                    f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]",
                    "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}",
                )
                for one in section.pairs
            ]
            parts += ["Paired differences on the same items:", _table(head, pairs)]
        if published := references(section.benchmark, section.metrics):
            published_rows = [
                (
                    one.paper,
                    one.table,
                    one.method,
                    "best or unstated" if one.shots is None else one.shots,
                    one.model,
                    f"{one.value:.2f} %",
                )
                for one in published
            ]
            head = ("paper", "table", "method", "shots", "model", "value")
            parts += ["Published results of other models:", _table(head, published_rows)]
    return "\n\n".join(parts) + "\n"


def _lines(section: Section, row: Row) -> Iterator[tuple[object, ...]]:
    r = row.result
    names = (section.benchmark, row.run, row.model, r.method, r.shots)
    counts = (section.item_count, r.n, r.failed, r.missing, r.invalid)
    costs = (r.calls, r.prompt_tokens, r.completion_tokens, r.cost_usd, row.per_item(r.seconds))
    yield (*names, *counts, r.metric, r.value, r.low, r.high, *costs)
    for one in r.also:
        yield (*names, *counts, one.metric, one.value, one.low, one.high, *costs)


def _figures(section: Section) -> tuple[list[str], list[tuple[object, ...]]]:
    named = len(section.runs) > 1
    head = [
        *(("run",) if named else ()),
        "method",
        "shots",
        "n",
        section.metric,
        *section.other_metrics,
    ]
    head += ["invalid", "failed", "missing", "calls", "tokens", "USD", "seconds per answer"]
    rows: list[tuple[object, ...]] = []
    for row in section.rows:
        r = row.result
        also = {one.metric: (one.value, one.low, one.high) for one in r.also}
        figures = [(r.value, r.low, r.high), *(also.get(name) for name in section.other_metrics)]
        rows.append(
            (
                *((row.run,) if named else ()),
                r.method,
                r.shots,
                r.n,
                *map(_figure, figures),
                r.invalid,
                r.failed,
                r.missing,
                r.calls,
                row.tokens,
                "unknown" if r.cost_usd is None else f"{r.cost_usd:.4f}",
                "–" if (seconds := row.per_item(r.seconds)) is None else f"{seconds:.2f}",
            )
        )
    return head, rows


def _figure(values: tuple[float | None, float | None, float | None] | None) -> str:
    if values is None or values[0] is None:
        return "–"
    value, low, high = values
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_escaped(str(cell)) for cell in line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


SCRIPTS = ("comparison.js", "items.js")
HERE = "bottega.evaluation.report"
MAX_ERRORS = 8
# Settings shown first.
FIRST = ("model", "seed", "prompt", "order", "retrieve", "embedder")


@dataclass(frozen=True)
class SectionView:
    """Section with its charts and counts."""

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
        """Return the published value of this method by the main metric."""
        return next(
            (one.value for one in self.references if one.column == column and _matches(one, row)),
            None,
        )


def render(sections: Sequence[Section], *, title: str, made: str) -> str:
    contents = payload(sections)
    program = "\n".join(files(HERE).joinpath(name).read_text("utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode("ascii")
    return (
        page_environment()
        .get_template("report/report.html")
        .render(
            title=title,
            made=made,
            rule=EXCLUSION_RULE,
            views=[_section_view(section) for section in sections],
            data=Markup(contents.json.decode()),
            contents=contents,
            style=style_sheet("report/report.css"),
            program=Markup(program),
            digest=digest,
        )
    )


def _section_view(section: Section) -> SectionView:
    answered = any(row.result.value is not None for row in section.rows)
    metric = section.metric.replace("_", " ")
    published = references(section.benchmark, section.metrics)
    beside = [one for one in published if any(_matches(one, row) for row in section.rows)]
    errors = Counter(error for row in section.rows for error in row.failures.values())
    return SectionView(
        section,
        by_shots(shots_of(section), f"{metric} by number of demonstrations") if answered else None,
        by_cost(cost_series(section), f"{metric} by cost", cost_axis(section))
        if answered
        else None,
        breakdowns(section),
        confusions(section),
        published,
        list(dict.fromkeys(one.column for one in beside)),
        _settings(section),
        errors.most_common(MAX_ERRORS),
    )


def _matches(one: Reference, row: Row) -> bool:
    return (
        row.result.method in one.ours
        and row.result.metric in one.metrics
        and one.shots in (None, row.result.shots)
    )


def _settings(section: Section) -> dict[str, list[Any]]:
    """Return the settings by name, one value for each run, without those in the section's head."""
    runs = section.runs.values()
    names = dict.fromkeys([*FIRST, *(name for run in runs for name in run.settings)])
    shown_above = ("benchmark", "metrics")
    return {
        name: [run.settings.get(name) for run in runs]
        for name in names
        if name not in shown_above and any(name in run.settings for run in runs)
    }


PAGE, CSV, MARKDOWN = "index.html", "results.csv", "results.md"


@dataclass(frozen=True)
class Report:
    """Written report; `unplotted` is the reason for missing plots."""

    sections: Sequence[Section]
    files: Sequence[Path]
    unplotted: MissingDependencyError | None


def write_report(folders: Sequence[Path], out: Path) -> Report:
    """Write a report of the runs in `folders` to `out`."""
    runs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    found = sections(runs)
    title = f"Report: {', '.join(dict.fromkeys(section.benchmark for section in found))}"
    made = f"Created {_now()} by bottega {__version__} from {_sources(runs)}"
    _make(out)
    texts = {
        PAGE: render(found, title=title, made=made),
        CSV: as_csv(found),
        MARKDOWN: as_markdown(found, title=title, made=made),
    }
    files = [_written(out / name, text) for name, text in texts.items()]
    try:
        return Report(found, [*files, *plot(found, out)], None)
    except MissingDependencyError as error:
        return Report(found, files, error)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique path endings of the folders."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise SettingError("a folder is given twice", hint="pass each run once")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [path_text(name) for name in names]


def _sources(runs: dict[str, StoredRun]) -> str:
    return f"the folder{'s' * (len(runs) > 1)} {', '.join(runs)}"


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"{out} cannot be created: {error.strerror}", hint="set another --out folder"
        ) from error


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return path


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
