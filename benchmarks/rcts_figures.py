"""Tables and figures of the RCTS experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.plots import errorbars, side_by_side
from benchmarks.rcts_plan import (
    MethodConfig,
    Rewarding,
    Setting,
    alphas,
    components,
    headline,
    main_rewards,
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
    "less rcts-flat",
    "less width 3",
    "less early stop",
    "invalid",
    "calls",
    "prompt tokens",
    "completion tokens",
)
USUAL = MethodConfig("rcts")
# What `rcts-random` does not have.
OF_TREES = {
    one.name: getattr(USUAL, one.name)
    for one in fields(MethodConfig)
    if one.name in ("children", "parallel", "exploration", "early_stop")
}


@dataclass
class SettingResults:
    """Results of one setting: answers of each method by seed, and the seconds per query of some
    methods.
    """

    setting: Setting
    runs: dict[MethodConfig, dict[int, list[ScoredAnswer]]] = field(default_factory=dict)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)

    def keep(self, config: MethodConfig, seed: int, scored: list[ScoredAnswer]) -> None:
        self.runs.setdefault(config, {})[seed] = scored

    def right(self, config: MethodConfig, seeds: Sequence[int] | None = None) -> list[bool]:
        """Return the outcomes of the seeds in sequence, each in the order of its items."""
        by_seed = self.runs[config]
        return [one.correct for seed in seeds or list(by_seed) for one in by_seed[seed]]

    def estimate(self, config: MethodConfig) -> Estimate:
        return accuracy(self.right(config))

    def less(self, config: MethodConfig, other: MethodConfig) -> Estimate | None:
        """Return the paired difference on common items of common seeds; None if a method did not
        run.
        """
        seeds = [seed for seed in self.runs[config] if seed in self.runs.get(other, {})]
        if config == other or not seeds:
            return None
        return paired_difference(self.right(config, seeds), self.right(other, seeds))


def tables(measured: SettingResults) -> str:
    setting = measured.setting
    title = "Some methods" if setting.only else "All methods"
    parts = [_title(setting), _table(measured, title, headline(setting))]
    answers = rewards(setting)
    parts.append(_table(measured, "Rewards (figure 5 a); the oracle knows the answer", answers))
    if setting.deep:
        more = [config for reward in main_rewards(setting) for config in rollouts(reward)]
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
    noise = (
        f", {setting.noise:.0%} of the knowledge-base answers corrupted" if setting.noise else ""
    )
    few = f", {setting.per_class} examples a label" if setting.per_class else ""
    return (
        f"# RCTS: `{setting.spec}`{noise}{few}\n\n"
        f"Seeds {', '.join(map(str, setting.seeds))}, {setting.items} items each, examples by"
        f" {setting.retrieve}. Accuracy over all seeds with Wilson's 95 % interval, differences on"
        " the same items with Newcombe's; calls (completions) and tokens are a query's. Equal"
        " requests are counted once. Made by `benchmarks/rcts.py`, explained in"
        " [rcts.md](rcts.md)."
    )


def _table(measured: SettingResults, title: str, wanted: Sequence[MethodConfig]) -> str:
    queried = [config for config in dict.fromkeys(wanted) if config in measured.runs]
    if not queried:
        return ""
    lines = [f"{title}:", "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(_row(measured, config))} |" for config in queried]
    return "\n".join(lines)


def _row(measured: SettingResults, config: MethodConfig) -> Iterator[str]:
    runs = measured.runs[config]
    whole = [one for scored in runs.values() for one in scored]
    yield overrides(config)
    yield str(len(whole))
    yield _format(measured.estimate(config))
    yield " ".join(f"{accuracy(measured.right(config, [seed])).value:.3f}" for seed in runs)
    plain = MethodConfig("top-k", shots=config.shots, rationales=config.rationales)
    yield _format(measured.less(config, plain), signed=True)
    for kind in ("rcts-random", "rcts-flat"):
        flat = replace(config, kind=kind, **OF_TREES)
        searches = config.kind in ("rcts", "rcts-flat")
        yield _format(measured.less(config, flat), signed=True) if searches else ""
    # Of two settings: the wider tree, and the tree that does not stop early.
    for other in (replace(config, children=3), replace(config, early_stop=True)):
        yield _format(measured.less(config, other), signed=True)
    yield str(sum(not one.answer.valid for one in whole))
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        yield f"{sum(getattr(one, name) for one in whole) / len(whole):.1f}"


def overrides(config: MethodConfig) -> str:
    """Return the settings that differ from the defaults."""
    differs = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("kind", "reward") and value != getattr(USUAL, name)
    }
    reward = [] if config.reward == "none" else [config.reward]
    words = [f"{name} {value}" for name, value in differs.items() if not isinstance(value, bool)]
    words += ["as released"] * config.released + ["no rationales"] * (not config.rationales)
    words += ["no early stop"] * (not config.early_stop)
    return ", ".join([config.kind, *reward, *words])


def _format(estimate: Estimate | None, signed: bool = False) -> str:
    if estimate is None:
        return ""
    sign = "+" if signed else ""
    value, low, high = (
        format(each, f"{sign}.3f") for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def _times(measured: SettingResults) -> str:
    if not measured.seconds:
        return ""
    head = ("method", "concurrency", "seconds a query", "of top-k's")
    lines = [f"Time, on new questions:\n\n| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (name, at_once), seconds in measured.seconds.items():
        ratio = seconds / measured.seconds["top-k", at_once]
        lines.append(f"| {name} | {at_once} | {seconds:.3f} | {ratio:.1f} |")
    return "\n".join(lines)


def rows(measured: SettingResults) -> list[dict[str, Any]]:
    """Return one row per method and seed, with 1 or 0 for each item."""
    return [
        {
            "setting": measured.setting.name,
            "seed": seed,
            **asdict(config),
            "n": len(scored),
            "accuracy": accuracy([one.correct for one in scored]).value,
            "invalid": sum(not one.answer.valid for one in scored),
            "calls": sum(one.calls for one in scored),
            "prompt_tokens": sum(one.prompt_tokens for one in scored),
            "completion_tokens": sum(one.completion_tokens for one in scored),
            "scores": "".join(str(int(one.correct)) for one in scored),
        }
        for config, runs in measured.runs.items()
        for seed, scored in runs.items()
    ]


def draw(measured: SettingResults, path: Path) -> None:
    """Draw figure 5: rewards and rollouts."""
    title = f"{measured.setting.spec}, label noise {measured.setting.noise:.0%}"
    with side_by_side(path, title, 2, width=12) as (bars, curves):
        _draw_rewards(measured, bars)
        _draw_rollouts(measured, curves)
        plain = measured.estimate(MethodConfig("top-k"))
        for axes in (bars, curves):
            axes.axhline(plain.value, color="black", lw=0.8, label="top-k")
            axes.axhspan(plain.low, plain.high, color="black", alpha=0.06, lw=0)
            axes.set_ylabel("accuracy")


def _draw_rewards(measured: SettingResults, axes: Any) -> None:
    wanted = [config for config in rewards(measured.setting) if config in measured.runs]
    names: list[Rewarding] = list(dict.fromkeys(config.reward for config in wanted))
    for kind, mark, aside in (("rcts", "o", -0.1), ("rcts-random", "s", 0.1)):
        queried = [config for config in wanted if config.kind == kind]
        at = [names.index(config.reward) + aside for config in queried]
        errorbars(axes, at, [measured.estimate(config) for config in queried], kind, fmt=mark)
    axes.set_xticks(range(len(names)), [f"{n} (ceiling)" if n == "oracle" else n for n in names])
    axes.set_title("Figure 5 (a): rewards, 10 rollouts")


def _draw_rollouts(measured: SettingResults, axes: Any) -> None:
    marks = iter("osD^v*")
    for reward in main_rewards(measured.setting):
        mark, colour = next(marks), None
        for kind, style in (("rcts", "-"), ("rcts-random", ":")):
            queried = [
                config
                for config in rollouts(reward)
                if config.kind == kind and config in measured.runs
            ]
            at = [config.rollouts * (1 if kind == "rcts" else 1.04) for config in queried]
            name = f"{kind}, {reward}" + (" (ceiling)" if reward == "oracle" else "")
            answers = [measured.estimate(config) for config in queried]
            more = {"linestyle": style, "marker": mark, "color": colour}
            colour = errorbars(axes, at, answers, name, **more)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 10], ["1", "2", "4", "8", "10"])
    axes.set_xlabel("rollouts")
    axes.set_title("Figure 5 (b): rollouts")
