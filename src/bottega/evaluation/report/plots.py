"""Plots of a report as PNG files, for papers and slides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bottega._util.progress import Step
from bottega.errors import require_extra
from bottega.evaluation.report.charts import Series, cost_axis, cost_series, shots_of
from bottega.evaluation.report.sections import Section
from bottega.evaluation.report.stream_sections import StreamSection, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MARKERS = "os^Dv+XP"
DASHES = ("-", "--", ":", "-.")
SIZE, DPI = (6.4, 4.0), 160
OFFSET = 0.02


def plot(sections: Sequence[Section], folder: Path, step: Step) -> list[Path]:
    """Write the plots; return their paths. `step` counts the sections. Raises
    `MissingDependencyError` without matplotlib."""
    require_extra("matplotlib", "eval")
    paths: list[Path] = []
    for index, section in enumerate(sections):
        if any(row.result.value is not None for row in section.rows):
            paths += _section(section, folder, _stem(section, index, len(sections)))
        step(1)
    return paths


def plot_streams(sections: Sequence[StreamSection], folder: Path, step: Step) -> list[Path]:
    """Write the figures by the apprentice's share and along the streams; return their paths.
    `step` counts the sections."""
    paths: list[Path] = []
    for number, section in enumerate(sections, start=1):
        shown = figures(section) if section.points else ()
        for index, figure in enumerate(shown, start=1):
            titles = (figure.title, figure.x_title, section.metric)
            path = folder / f"streams-{number}-{index}.png"
            paths.append(_save_plot(figure.series, path, titles, by_shots=False))
        step(1)
    return paths


def _stem(section: Section, index: int, of: int) -> str:
    """Return the shortest unique file name prefix."""
    if of == 1:
        return ""
    kind = re.sub(r"\W+", "-", section.benchmark.partition(":")[0])
    return f"{index + 1}-{kind}-"


def _section(section: Section, folder: Path, stem: str) -> Iterator[Path]:
    yield _save_plot(
        shots_of(section),
        folder / f"{stem}accuracy-shots.png",
        (section.benchmark, "demonstrations", section.metric),
        by_shots=True,
    )
    yield _save_plot(
        cost_series(section),
        folder / f"{stem}cost-quality.png",
        (section.benchmark, cost_axis(section), section.metric),
        by_shots=False,
    )


def _save_plot(
    series: Sequence[Series], path: Path, texts: tuple[str, str, str], *, by_shots: bool
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(SIZE, DPI, layout="constrained")
    axes = figure.subplots()
    shots = sorted({point.x for one in series if not one.flat for point in one.points})
    for i, one in enumerate(series):
        _line(axes, one, i, shots if by_shots else None, OFFSET * (i - (len(series) - 1) / 2))
    if by_shots:
        axes.set_xticks(range(len(shots)), [f"{k:g}" for k in shots])
    title, x, y = texts
    axes.set_title(title, parse_math=False)
    axes.set_xlabel(x)
    axes.set_ylabel(y.replace("_", " "))
    axes.grid(axis="y", alpha=0.3)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)
    figure.savefig(path)
    return path


def _line(axes: Axes, one: Series, index: int, shots: list[float] | None, aside: float) -> None:
    """Plot a series; shots have equal distances, and series are offset, as on the page."""
    if shots is None:
        points, xs = one.points, [point.x for point in one.points]
    elif one.flat:
        ends = max(len(shots) - 1, 0)
        points, xs = one.points[:1] * 2, [-0.3, ends + 0.3]
    else:
        points, xs = one.points, [shots.index(point.x) + aside for point in one.points]
    values = [point.value for point in points]
    around = (
        [point.value - point.low for point in points],
        [point.high - point.value for point in points],
    )
    axes.errorbar(
        xs,
        values,
        yerr=around,
        label=one.name,
        marker=MARKERS[index % len(MARKERS)],
        linestyle=DASHES[index % len(DASHES)],
        color=f"C{index % 10}",
        capsize=2,
    )
