"""Tables and figures of the RCTS experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.plots import errorbars, side_by_side
from benchmarks.rcts_plan import (
    Rewarding,
    Setting,
    Way,
    alphas,
    components,
    drawn,
    headline,
    rewards,
    rollouts,
    shapes,
    shots,
)
from bottega.evaluation.metrics.intervals import Estimate, accuracy, paired_difference
from bottega.evaluation.outcomes import ScoredAnswer

HEAD = (
    "method",
    "n",
    "accuracy",
    "by seed",
    "less top-k",
    "less rcts-random",
    "invalid",
    "calls",
    "prompt tokens",
    "completion tokens",
)
USUAL = Way("rcts")
# What `rcts-random` does not have.
OF_TREES = {
    one.name: getattr(USUAL, one.name)
    for one in fields(Way)
    if one.name in ("children", "parallel", "exploration")
}


@dataclass
class Measured:
    """Results of one setting: answers of each method by seed, and the seconds per query of some
    methods.
    """

    setting: Setting
    runs: dict[Way, dict[int, list[ScoredAnswer]]] = field(default_factory=dict)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)

    def keep(self, way: Way, seed: int, scored: list[ScoredAnswer]) -> None:
        self.runs.setdefault(way, {})[seed] = scored

    def right(self, way: Way, seeds: Sequence[int] | None = None) -> list[bool]:
        """Return the outcomes of the seeds in sequence, each in the order of its items."""
        by_seed = self.runs[way]
        return [one.correct for seed in seeds or list(by_seed) for one in by_seed[seed]]

    def estimate(self, way: Way) -> Estimate:
        return accuracy(self.right(way))

    def less(self, way: Way, other: Way) -> Estimate | None:
        """Return the paired difference on common items of common seeds; None if a method did not
        run.
        """
        seeds = [seed for seed in self.runs[way] if seed in self.runs.get(other, {})]
        if way == other or not seeds:
            return None
        return paired_difference(self.right(way, seeds), self.right(other, seeds))


def tables(measured: Measured) -> str:
    setting = measured.setting
    title = "Some methods" if setting.only else "All methods"
    parts = [_title(setting), _table(measured, title, headline(setting))]
    found = rewards(setting)
    parts.append(_table(measured, "Rewards (figure 5 a); the oracle knows the answer", found))
    if setting.deep:
        more = [way for reward in drawn(setting) for way in rollouts(reward)]
        parts += [
            _table(measured, "Search and rationales (table 4)", components(setting)),
            _table(measured, "Alpha (table 5)", alphas(setting)),
            _table(measured, "Rollouts (figure 5 b)", more),
            _table(measured, "The tree's shape", shapes(setting)),
            _table(measured, "Demonstrations shown", shots(setting)),
            _times(measured),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _title(setting: Setting) -> str:
    noise = f", {setting.noise:.0%} of the known answers wrong" if setting.noise else ""
    few = f", {setting.per_class} examples a label" if setting.per_class else ""
    return (
        f"# RCTS: `{setting.spec}`{noise}{few}\n\n"
        f"Seeds {', '.join(map(str, setting.seeds))}, {setting.items} items each, examples by"
        f" {setting.retrieve}. Accuracy over all seeds with Wilson's 95 % interval, differences on"
        " the same items with Newcombe's; calls (completions) and tokens are a query's. What was"
        " asked twice is counted once. Made by `benchmarks/rcts.py`, explained in"
        " [rcts.md](rcts.md)."
    )


def _table(measured: Measured, title: str, wanted: Sequence[Way]) -> str:
    asked = [way for way in dict.fromkeys(wanted) if way in measured.runs]
    if not asked:
        return ""
    lines = [f"{title}:", "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(_row(measured, way))} |" for way in asked]
    return "\n".join(lines)


def _row(measured: Measured, way: Way) -> Iterator[str]:
    runs = measured.runs[way]
    whole = [one for scored in runs.values() for one in scored]
    yield told(way)
    yield str(len(whole))
    yield _told(measured.estimate(way))
    yield " ".join(f"{accuracy(measured.right(way, [seed])).value:.3f}" for seed in runs)
    plain = Way("top-k", shots=way.shots, rationales=way.rationales)
    flat = replace(way, kind="rcts-random", **OF_TREES)
    yield _told(measured.less(way, plain), signed=True)
    yield _told(measured.less(way, flat), signed=True) if way.kind == "rcts" else ""
    yield str(sum(not one.answer.valid for one in whole))
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        yield f"{sum(getattr(one, name) for one in whole) / len(whole):.1f}"


def told(way: Way) -> str:
    """Return the settings that differ from the defaults."""
    differs = {
        name: value
        for name, value in asdict(way).items()
        if name not in ("kind", "reward") and value != getattr(USUAL, name)
    }
    reward = [] if way.reward == "none" else [way.reward]
    words = [f"{name} {value}" for name, value in differs.items() if not isinstance(value, bool)]
    words += ["as released"] * way.released + ["no rationales"] * (not way.rationales)
    return ", ".join([way.kind, *reward, *words])


def _told(estimate: Estimate | None, signed: bool = False) -> str:
    if estimate is None:
        return ""
    sign = "+" if signed else ""
    value, low, high = (
        format(each, f"{sign}.3f") for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def _times(measured: Measured) -> str:
    if not measured.seconds:
        return ""
    head = ("method", "asked at once", "seconds a query", "of top-k's")
    lines = [f"Time, on new questions:\n\n| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (name, at_once), seconds in measured.seconds.items():
        ratio = seconds / measured.seconds["top-k", at_once]
        lines.append(f"| {name} | {at_once} | {seconds:.3f} | {ratio:.1f} |")
    return "\n".join(lines)


def rows(measured: Measured) -> list[dict[str, Any]]:
    """Return one row per method and seed, with 1 or 0 for each item."""
    return [
        {
            "setting": measured.setting.name,
            "seed": seed,
            **asdict(way),
            "n": len(scored),
            "accuracy": accuracy([one.correct for one in scored]).value,
            "invalid": sum(not one.answer.valid for one in scored),
            "calls": sum(one.calls for one in scored),
            "prompt_tokens": sum(one.prompt_tokens for one in scored),
            "completion_tokens": sum(one.completion_tokens for one in scored),
            "scores": "".join(str(int(one.correct)) for one in scored),
        }
        for way, runs in measured.runs.items()
        for seed, scored in runs.items()
    ]


def draw(measured: Measured, path: Path) -> None:
    """Draw figure 5: rewards and rollouts."""
    title = f"{measured.setting.spec}, label noise {measured.setting.noise:.0%}"
    with side_by_side(path, title, 2, width=12) as (bars, curves):
        _draw_rewards(measured, bars)
        _draw_rollouts(measured, curves)
        plain = measured.estimate(Way("top-k"))
        for axes in (bars, curves):
            axes.axhline(plain.value, color="black", lw=0.8, label="top-k")
            axes.axhspan(plain.low, plain.high, color="black", alpha=0.06, lw=0)
            axes.set_ylabel("accuracy")


def _draw_rewards(measured: Measured, axes: Any) -> None:
    wanted = [way for way in rewards(measured.setting) if way in measured.runs]
    names: list[Rewarding] = list(dict.fromkeys(way.reward for way in wanted))
    for kind, mark, aside in (("rcts", "o", -0.1), ("rcts-random", "s", 0.1)):
        asked = [way for way in wanted if way.kind == kind]
        at = [names.index(way.reward) + aside for way in asked]
        errorbars(axes, at, [measured.estimate(way) for way in asked], kind, fmt=mark)
    axes.set_xticks(range(len(names)), [f"{n} (ceiling)" if n == "oracle" else n for n in names])
    axes.set_title("Figure 5 (a): rewards, 10 rollouts")


def _draw_rollouts(measured: Measured, axes: Any) -> None:
    marks = iter("osD^v*")
    for reward in drawn(measured.setting):
        mark, colour = next(marks), None
        for kind, style in (("rcts", "-"), ("rcts-random", ":")):
            asked = [way for way in rollouts(reward) if way.kind == kind and way in measured.runs]
            at = [way.rollouts * (1 if kind == "rcts" else 1.04) for way in asked]
            name = f"{kind}, {reward}" + (" (ceiling)" if reward == "oracle" else "")
            found = [measured.estimate(way) for way in asked]
            more = {"linestyle": style, "marker": mark, "color": colour}
            colour = errorbars(axes, at, found, name, **more)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 10], ["1", "2", "4", "8", "10"])
    axes.set_xlabel("rollouts")
    axes.set_title("Figure 5 (b): rollouts")
