"""Tables and figures of the Cache-of-Thought experiments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots import errorbars, side_by_side
from bottega.evaluation.metrics.intervals import Estimate
from bottega.evaluation.metrics.metric import CostQuality, average_gap_recovered
from bottega.evaluation.streams import StreamResult, gain, growth, mean_over

if TYPE_CHECKING:
    from benchmarks.cache_of_thought import SettingResults

STARTS = ("NoStart", "ColdStart", "WarmStart", "Hierarchical", "half first", "coverage")
BASELINES = (
    "no cache",
    "random, NoStart",
    "vote, NoStart",
    "random, WarmStart",
    "vote, WarmStart",
)
APPRENTICE = "apprentice"
THIRDS = ("first", "second", "third")


def tables(measured: SettingResults) -> str:
    setting = measured.setting
    title = (
        f"# Cache-of-Thought: `{setting.spec}`\n\n{len(setting.seeds)} streams (seeds"
        f" {', '.join(map(str, setting.seeds))}) of {measured.fixed['master'][0].length} items,"
        f" {setting.shots} shown, by the view `{setting.view}`. Intervals at 95 % are those of a"
        " bootstrap over streams and items; those of APGR are the lowest and highest stream's."
        " Made by `benchmarks/cache_of_thought.py`, explained in"
        " [cache_of_thought.md](cache_of_thought.md)."
    )
    parts = (title, _fixed(measured), _overall(measured), _gains(measured), _thirds(measured))
    more = (_paired(measured), _bars(measured), _apgr(measured))
    return "\n\n".join((*parts, *more)) + "\n"


def _fixed(measured: SettingResults) -> str:
    rows = [(name, _format(mean_over(found))) for name, found in measured.fixed.items()]
    return "Fixed caches, the apprentice's accuracy:\n\n" + _table(("row", "accuracy"), rows)


def _overall(measured: SettingResults) -> str:
    rates = measured.setting.rates
    rows = [
        (name, *(_cell(measured, name, rate) for rate in rates)) for name in (*STARTS, *BASELINES)
    ]
    head = ("start", *(f"{rate} %" for rate in rates))
    return "Accuracy of all answers by the apprentice's share (figure 5):\n\n" + _table(head, rows)


def _gains(measured: SettingResults) -> str:
    """Return gains over the zero-shot apprentice on the items that it answered."""
    rates = measured.setting.rates
    rows = [(name, *(_format(_gain(measured, name, rate)) for rate in rates)) for name in STARTS]
    head = ("start", *(f"{rate} %" for rate in rates))
    return "The apprentice's gain over itself without examples (figure 6):\n\n" + _table(head, rows)


def _thirds(measured: SettingResults) -> str:
    rates = measured.setting.rates
    rows = []
    for start in STARTS:
        for rate in rates:
            own = [_gain(measured, start, rate, part) for part in range(3)]
            grown = growth(measured.streams[start, rate], APPRENTICE)
            rows.append((start, f"{rate} %", *map(_format, own), _format(grown, True)))
    head = ("start", "share", *(f"{name} third" for name in THIRDS), "third less first")
    return "The same by third of the stream (figure 7):\n\n" + _table(head, rows)


def _paired(measured: SettingResults) -> str:
    """Compare paired streams. The same coin routes equal queries; for other routers compare all
    queries.
    """
    pairs = (
        ("NoStart", "random, NoStart", APPRENTICE),
        ("NoStart", "vote, NoStart", APPRENTICE),
        ("WarmStart", "random, WarmStart", APPRENTICE),
        ("WarmStart", "vote, WarmStart", APPRENTICE),
        ("WarmStart", "Hierarchical", APPRENTICE),
        ("half first", "NoStart", None),
        ("coverage", "NoStart", None),
    )
    rows = []
    for ours, theirs, tier in pairs:
        for rate in _shares(measured, theirs):
            found = gain(measured.streams[ours, rate], measured.streams[theirs, rate], tier=tier)
            rows.append((f"{ours} less {theirs}", f"{rate} %", tier or "all", _format(found, True)))
    head = ("difference", "apprentice's share", "answers", "on the same items")
    return "Paired differences:\n\n" + _table(head, rows)


def _bars(measured: SettingResults) -> str:
    """Return error bars, and the master's share of the queries, which depends on seed and
    router."""
    master = measured.fixed["master"]
    alone = mean_over(master).value
    rows = []
    for name in STARTS:
        for rate in _shares(measured, name):
            streams = measured.streams[name, rate]
            share = sum(one.share("master") for one in streams) / len(streams)
            overall = mean_over(streams)
            ratios = Estimate(
                *(each / alone for each in (overall.value, overall.low, overall.high))
            )
            rows.append((name, f"{rate} %", f"{share:.3f}", _format(ratios)))
    return "Share of the master's accuracy that is reached:\n\n" + _table(
        ("start", "apprentice", "master's share of queries", "of its accuracy"), rows
    )


def _apgr(measured: SettingResults) -> str:
    rows = [(name, _format(apgr(measured, name))) for name in (*STARTS, *BASELINES)]
    return "APGR, cost being calls of the master:\n\n" + _table(("start", "APGR"), rows)


def apgr(measured: SettingResults, name: str) -> Estimate:
    """Return the APGR over the mean of all streams, with its range over the seeds."""
    seeds = range(len(measured.setting.seeds))
    whole = _apgr_of(measured, name, list(seeds))
    single = [_apgr_of(measured, name, [seed]) for seed in seeds]
    return Estimate(whole, min(single), max(single))


def _apgr_of(measured: SettingResults, name: str, seeds: Sequence[int]) -> float:
    def mean(streams: Sequence[StreamResult]) -> float:
        return mean_over([streams[seed] for seed in seeds]).value

    weak, strong = (mean(measured.fixed[who]) for who in ("zero-shot", "master"))
    curve = []
    for rate in _shares(measured, name):
        streams = measured.streams[name, rate]
        share = sum(streams[seed].share("master") for seed in seeds) / len(seeds)
        curve.append(CostQuality(share, mean(streams)))
    return average_gap_recovered(curve, weak=weak, strong=strong)


def _gain(measured: SettingResults, name: str, rate: int, part: int | None = None) -> Estimate:
    streams, alone = measured.streams[name, rate], measured.fixed["zero-shot"]
    return gain(streams, alone, tier=APPRENTICE, part=part)


def _shares(measured: SettingResults, name: str) -> list[int]:
    return [rate for rate in measured.setting.rates if (name, rate) in measured.streams]


def _cell(measured: SettingResults, name: str, rate: int) -> str:
    streams = measured.streams.get((name, rate))
    return "" if streams is None else _format(mean_over(streams))


def _format(estimate: Estimate, signed: bool = False) -> str:
    if math.isnan(estimate.value):
        return "no answers"
    sign = "+" if signed else ""
    value, low, high = (
        format(each, f"{sign}.3f") for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        yield from (f"| {' | '.join(row)} |" for row in rows)

    return "\n".join(lines())


def draw(measured: SettingResults, path: Path) -> None:
    """Draw figures 5, 6 and 7 side by side."""
    rates = measured.setting.rates
    looks = dict(zip((*STARTS, *BASELINES), "osD^*pxv1P2", strict=True))

    def curve(
        axes: Any, at: Sequence[int], found: Sequence[Estimate], name: str, **style: object
    ) -> None:
        errorbars(axes, at, found, name, marker=looks.get(name, "o"), **style)

    title = f"{measured.setting.spec}, shown: {measured.setting.shots}"
    with side_by_side(path, title, 3, width=15) as (overall, gains, thirds):
        for name in (*STARTS, *BASELINES):
            dashed = {"linestyle": ":" if name in BASELINES else "-", "alpha": 0.8}
            at = _shares(measured, name)
            answers = [mean_over(measured.streams[name, rate]) for rate in at]
            curve(overall, at, answers, name, **dashed)
        overall.axhline(mean_over(measured.fixed["master"]).value, color="black", lw=0.8)
        overall.set_title("Figure 5: all answers (line: master alone)")
        for name in STARTS:
            curve(gains, rates, [_gain(measured, name, rate) for rate in rates], name)
        gains.set_title("Figure 6: the apprentice's gain over zero-shot")
        for part, third in enumerate(THIRDS):
            own = [_gain(measured, "NoStart", rate, part) for rate in rates]
            curve(thirds, rates, own, f"{third} third")
        thirds.set_title("Figure 7: the same by third, NoStart")
        for axes in (overall, gains, thirds):
            axes.set_xlabel("share of queries for the apprentice, %")
