"""The curves of a report as PNG files, for papers and slides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.errors import MissingDependencyError
from bottega.evaluation.curves import Series
from bottega.evaluation.report.drawing import cost_axis, cost_series, shot_series
from bottega.evaluation.report.figures import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^Dv+XP"
DASHES = ("-", "--", ":", "-.")
SIZE, DPI = (6.4, 4.0), 160
ASIDE = 0.02


def plot(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Raises `MissingDependencyError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError("matplotlib", "eval") from error
    return [
        path
        for place, section in enumerate(sections)
        if any(row.result.value is not None for row in section.rows)
        for path in _section(section, folder, _stem(section, place, len(sections)))
    ]


def _stem(section: Section, place: int, of: int) -> str:
    """As short as it can be without two that are the same."""
    if of == 1:
        return ""
    kind = re.sub(r"\W+", "-", section.benchmark.partition(":")[0])
    return f"{place + 1}-{kind}-"


def _section(section: Section, folder: Path, stem: str) -> Iterator[Path]:
    yield _drawn(
        shot_series(section),
        folder / f"{stem}accuracy-shots.png",
        (section.benchmark, "demonstrations", section.metric),
        by_shots=True,
    )
    yield _drawn(
        cost_series(section),
        folder / f"{stem}cost-quality.png",
        (section.benchmark, cost_axis(section), section.metric),
        by_shots=False,
    )


def _drawn(
    series: Sequence[Series], path: Path, texts: tuple[str, str, str], *, by_shots: bool
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(SIZE, DPI, layout="constrained")
    axes = figure.subplots()
    shots = sorted({point.x for one in series if not one.flat for point in one.points})
    for i, one in enumerate(series):
        _line(axes, one, i, shots if by_shots else None, ASIDE * (i - (len(series) - 1) / 2))
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


def _line(axes: Axes, one: Series, place: int, shots: list[float] | None, aside: float) -> None:
    """Numbers of shots stand at equal distances, and lines beside each other, as on the page."""
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
        marker=MARKERS[place % len(MARKERS)],
        linestyle=DASHES[place % len(DASHES)],
        color=f"C{place % 10}",
        capsize=2,
    )
