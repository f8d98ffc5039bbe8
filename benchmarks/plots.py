"""Shared plotting helpers of the experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.evaluation.metrics.metric import Estimate


@contextmanager
def side_by_side(path: Path, title: str, count: int, width: float) -> Iterator[Any]:
    """Yield `count` axes, each with a grid and a legend; write the figure on exit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, count, figsize=(width, 4.6))
    yield all_axes
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def errorbars(
    axes: Any, at: Sequence[float], found: Sequence[Estimate], name: str, **style: Any
) -> Any:
    """Draw a line with error bars and return its colour."""
    values = [one.value for one in found]
    below = [one.value - one.low for one in found]
    above = [one.high - one.value for one in found]
    line = axes.errorbar(at, values, (below, above), label=name, capsize=2, **style)
    return line.lines[0].get_color()
