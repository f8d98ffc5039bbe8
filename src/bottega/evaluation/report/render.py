"""Report of runs: an HTML page, CSV, Markdown and plots."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bottega import __version__
from bottega._util.durable_files import make_out_folder
from bottega._util.progress import Stages, no_stages
from bottega.errors import MissingDependencyError, SettingError
from bottega.evaluation.methods.prompts import description_text
from bottega.evaluation.methods.retrieval import EXCLUSION_RULE
from bottega.evaluation.report.charts import (
    Chart,
    by_cost,
    by_shots,
    cost_axis,
    cost_series,
    shots_of,
)
from bottega.evaluation.report.explanation import page_environment, style_sheet
from bottega.evaluation.report.payload import payload
from bottega.evaluation.report.plots import plot, plot_streams
from bottega.evaluation.report.references import Reference, references
from bottega.evaluation.report.result_tables import (
    as_csv,
    as_markdown,
    items_as_csv,
    streams_as_csv,
    streams_as_markdown,
)
from bottega.evaluation.report.runs import StoredRun, read_run
from bottega.evaluation.report.sections import (
    Breakdown,
    Confusions,
    ReportRow,
    Section,
    breakdowns,
    confusions,
    demonstration_texts,
    sections,
)
from bottega.evaluation.report.stream_sections import (
    StreamSection,
    figures,
    is_stream_run,
    stream_section,
)
from bottega.evaluation.report.visual_rag_figures import Efficiency, average_rows, efficiency
from bottega.evaluation.runs.run_store import ORDERS, SHOWN
from bottega.image import path_text

SCRIPTS = ("comparison.js", "items.js")
HERE = "bottega.evaluation.report"
MAX_ERRORS = 8
# Settings shown first.
FIRST = ("model", "seed", "prompt", "order", "retrieve", "embedder")
PAGE, CSV, MARKDOWN = "index.html", "results.csv", "results.md"
ITEM_CSV, STREAM_CSV = "items.csv", "streams.csv"


@dataclass(frozen=True)
class SectionView:
    """Section with its charts and counts."""

    section: Section
    demonstrations: Sequence[str]
    shots: Chart | None
    costs: Chart | None
    efficiency: Sequence[Efficiency]
    breakdowns: Sequence[Breakdown]
    confusions: Confusions | None
    references: Sequence[Reference]
    columns: Sequence[str]
    settings: Mapping[str, Sequence[object]]
    errors: Sequence[tuple[str, int]]

    @property
    def unfinished(self) -> list[ReportRow]:
        return [row for row in self.section.rows if row.result.failed or row.result.missing]

    def published(self, row: ReportRow, column: str) -> float | None:
        """Return the published value of this method by the main metric."""
        return next(
            (one.value for one in self.references if one.column == column and _matches(one, row)),
            None,
        )


@dataclass(frozen=True)
class StreamView:
    """Stream run with its charts; `further` are those along the stream."""

    section: StreamSection
    main: Sequence[Chart]
    further: Sequence[Chart]
    settings: Mapping[str, object]


def render(
    sections: Sequence[Section],
    streams: Sequence[StreamSection] = (),
    *,
    title: str,
    made: str,
) -> str:
    contents, program = payload(sections), _program()
    return (
        page_environment()
        .get_template("report/report.html")
        .render(
            title=title,
            made=made,
            rule=EXCLUSION_RULE if sections else "",
            views=[_section_view(section) for section in sections],
            averages=average_rows(sections),
            stream_views=[stream_view(section) for section in streams],
            data=Markup(contents.json.decode()),
            contents=contents,
            style=style_sheet("report/report.css"),
            program=Markup(program),
            digest=_digest(program),
        )
    )


def content_policy() -> str:
    """Return the Content-Security-Policy of the page: its own script alone, and no network."""
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
        f" script-src 'sha256-{_digest(_program())}'; frame-ancestors 'none'; base-uri 'none';"
        " form-action 'none'; sandbox allow-scripts"
    )


def _program() -> str:
    return "\n".join(files(HERE).joinpath(name).read_text("utf-8") for name in SCRIPTS)


def _digest(program: str) -> str:
    return base64.b64encode(hashlib.sha256(program.encode()).digest()).decode("ascii")


def stream_view(section: StreamSection) -> StreamView:
    found = list(figures(section)) if section.points else []
    main = [figure.chart for figure in found if figure.by_share]
    hidden = (ORDERS, "metrics", "data", "corpus")
    settings = {k: v for k, v in section.run.settings.items() if k not in hidden}
    further = [figure.chart for figure in found if not figure.by_share]
    return StreamView(section, main, further, settings)


def _section_view(section: Section) -> SectionView:
    answered = any(row.result.value is not None for row in section.rows)
    metric = section.metric.replace("_", " ")
    published = references(section.benchmark, section.metrics)
    beside = [one for one in published if any(_matches(one, row) for row in section.rows)]
    errors = Counter(error for row in section.rows for error in row.failures.values())
    return SectionView(
        section,
        demonstration_texts(section),
        by_shots(shots_of(section), f"{metric} by number of demonstrations") if answered else None,
        by_cost(cost_series(section), f"{metric} by cost", cost_axis(section))
        if answered
        else None,
        efficiency(section) if answered else [],
        breakdowns(section),
        confusions(section),
        published,
        list(dict.fromkeys(one.column for one in beside)),
        settings_of(section),
        errors.most_common(MAX_ERRORS),
    )


def _matches(one: Reference, row: ReportRow) -> bool:
    return (
        row.result.method in one.ours
        and row.result.metric in one.metrics
        and one.shots in (None, row.result.shots)
    )


def settings_of(section: Section) -> dict[str, list[Any]]:
    """Return the settings by name, one value for each run, without those in the section's head."""
    runs = section.runs.values()
    names = dict.fromkeys([*FIRST, *(name for run in runs for name in run.settings)])
    shown_above = ("benchmark", "metrics")
    return {
        name: [_setting(name, run.settings.get(name)) for run in runs]
        for name in names
        if name not in shown_above and any(name in run.settings for run in runs)
    }


def _setting(name: str, value: Any) -> Any:
    return description_text(value) if name == SHOWN and value else value


@dataclass(frozen=True)
class Report:
    """Written report; `unplotted` is the reason for missing plots."""

    sections: Sequence[Section]
    streams: Sequence[StreamSection]
    files: Sequence[Path]
    unplotted: MissingDependencyError | None


def write_report(folders: Sequence[Path], out: Path, stages: Stages = no_stages) -> Report:
    """Write a report of the runs in `folders` to `out`. `stages` shows the progress of reading the
    runs, scoring their methods and drawing the plots."""
    runs = {}
    with stages("reading runs", len(folders)) as step:
        for name, folder in zip(_names(folders), folders, strict=True):
            runs[name] = read_run(folder)
            step(1)
    found = sections({name: run for name, run in runs.items() if not is_stream_run(run)}, stages)
    streams = _stream_sections({n: run for n, run in runs.items() if is_stream_run(run)}, stages)
    names = [
        *(f"{one.config.benchmark}: streams" for one in streams),
        *(f.benchmark for f in found),
    ]
    title = f"Report: {', '.join(dict.fromkeys(names))}"
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    made = f"Created {now} by bottega {__version__} from {_sources(runs)}"
    make_out_folder(out)
    markdown = [as_markdown(found, title=title, made=made), *map(streams_as_markdown, streams)]
    texts = {
        PAGE: render(found, streams, title=title, made=made),
        CSV: as_csv(found),
        MARKDOWN: "\n".join(markdown),
        ITEM_CSV: items_as_csv(runs),
        **({STREAM_CSV: streams_as_csv(streams)} if streams else {}),
    }
    files = [_written(out / name, text) for name, text in texts.items()]
    try:
        with stages("drawing plots", len(found) + len(streams)) as step:
            plots = [*plot(found, out, step), *plot_streams(streams, out, step)]
        return Report(found, streams, [*files, *plots], None)
    except MissingDependencyError as error:
        return Report(found, streams, files, error)


def _stream_sections(runs: Mapping[str, StoredRun], stages: Stages) -> list[StreamSection]:
    found = []
    if runs:
        with stages("scoring streams", len(runs)) as step:
            for name, run in runs.items():
                found.append(stream_section(name, run))
                step(1)
    return found


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


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return path
