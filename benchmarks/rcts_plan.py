"""Plan of the RCTS experiments: tasks, methods, and the methods of each task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark

# More calls than `rcts` needs on average: a branch needs up to eleven; identical requests are
# shared.
SAMPLES = 36
# By number of rollouts: at least as many calls as the searches of codes need.
SAMPLES_OF_CODES = {10: SAMPLES, 27: 80, 64: 139}

Kind = Literal[
    "zero-shot",
    "random",
    "top-k",
    "vote",
    "majority",
    "best-of-n",
    "rcts",
    "rcts-random",
    "rcts-best-of-n",
    "rcts-flat",
]
SEARCHES: tuple[Kind, ...] = ("rcts", "rcts-random", "rcts-best-of-n", "rcts-flat")
SAMPLING: tuple[Kind, ...] = ("majority", "best-of-n")
PAPER_SEARCHES = SEARCHES[:3]
Rewarding = Literal["weighted", "self", "mutual", "ensemble", "oracle", "none"]


@dataclass(frozen=True)
class Setting:
    """Task with its settings. With `reasons`, its labelled examples have rationales. `reward` is
    that of its ablations, which run if `deep`. `only` replaces the list of methods. `simulated`
    tasks are answered by their simulated reader instead of the apprentice.
    """

    name: str
    spec: str
    retrieve: str = "image"
    embed: str = "bundled"
    simulated: bool = False
    noise: float = 0.0
    per_class: int | None = None
    reasons: bool = False
    deep: bool = False
    reward: Rewarding = "ensemble"
    seeds: tuple[int, ...] = (0, 1, 2)
    items: int = 100
    only: tuple[MethodConfig, ...] = ()

    def load(self, seed: int) -> Benchmark:
        return load_benchmark(
            self.spec,
            seed=seed,
            limit=self.items,
            per_class=self.per_class,
            label_noise=self.noise,
        )


@dataclass(frozen=True)
class MethodConfig:
    """Method with its settings; unset ones are the paper's defaults. It is the hashable key of its
    results.
    """

    kind: Kind
    reward: Rewarding = "none"
    alpha: float = 0.2
    rollouts: int = 10
    shots: int = 3
    children: int = 3
    parallel: int = 1
    exploration: float = 0.5
    early_stop: bool = True
    released: bool = False
    rationales: bool = True
    samples: int = 1


WIDTHS = (3, 20)


def searches_of_codes() -> tuple[MethodConfig, ...]:
    """Return the tree at each budget and width, with and without early stopping, and beside it the
    same draws without a tree and uniform draws."""
    return tuple(
        config
        for rollouts in SAMPLES_OF_CODES
        for config in (
            *(
                MethodConfig(
                    "rcts", "mutual", rollouts=rollouts, children=width, early_stop=early_stop
                )
                for width in WIDTHS
                for early_stop in (True, False)
            ),
            MethodConfig("rcts-flat", "mutual", rollouts=rollouts),
            MethodConfig("rcts-random", "mutual", rollouts=rollouts),
        )
    )


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("rules", "rules", noise=0.2, reasons=True, deep=True, reward="weighted"),
        Setting("attributes", "attributes", "dual", noise=0.2, deep=True),
        Setting("digits", "digits", per_class=5),
        Setting("image-only", "attributes", noise=0.2, seeds=(0,)),
        Setting(
            "noisier",
            "rules",
            noise=0.5,
            items=80,
            only=(
                MethodConfig("top-k"),
                MethodConfig("rcts-random", "weighted"),
                MethodConfig("rcts", "weighted"),
                MethodConfig("rcts", "weighted", children=20),
            ),
        ),
        Setting("clean", "rules", reasons=True, reward="weighted", seeds=(0,)),
        Setting(
            "codes",
            "codes",
            embed="pixels",
            simulated=True,
            items=200,
            only=(
                MethodConfig("zero-shot"),
                MethodConfig("top-k"),
                *(
                    MethodConfig(kind, samples=samples)
                    for samples in SAMPLES_OF_CODES.values()
                    for kind in SAMPLING
                ),
                MethodConfig("rcts-best-of-n", "mutual"),
                *searches_of_codes(),
                MethodConfig("rcts-random", "oracle"),
                MethodConfig("rcts-flat", "oracle"),
                *(
                    MethodConfig("rcts", "oracle", children=width, early_stop=False)
                    for width in WIDTHS
                ),
            ),
        ),
    )
}
ROLLOUTS = (1, 2, 4, 8, 10)
ALPHAS = (0.0, 0.2, 0.5, 0.8, 1.0)


def methods(setting: Setting, *, first: bool) -> list[MethodConfig]:
    """Return all methods of one seed; exploratory ones run on the first seed only."""
    answers = headline(setting) + rewards(setting)
    if setting.deep:
        answers += alphas(setting)
        answers += [config for reward in main_rewards(setting) for config in rollouts(reward)]
    if setting.deep and first:
        answers += components(setting) + shapes(setting) + shots(setting)
    return list(dict.fromkeys(answers))


def headline(setting: Setting) -> list[MethodConfig]:
    if setting.only:
        return list(setting.only)
    plain: tuple[Kind, ...] = ("zero-shot", "random", "top-k", "vote")
    both: tuple[Rewarding, ...] = ("weighted", "ensemble")
    return [
        *map(MethodConfig, plain),
        MethodConfig("majority", samples=SAMPLES),
        *(MethodConfig(kind, reward) for reward in both for kind in PAPER_SEARCHES),
    ]


def rewards(setting: Setting) -> list[MethodConfig]:
    """Return the methods of figure 5 (a). Without rationales the paper's reward is the mutual
    one."""
    if setting.only:
        return []
    apart: tuple[Rewarding, ...] = ("self", "mutual") if setting.reasons else ()
    every: tuple[Rewarding, ...] = (*apart, "weighted", "ensemble", "oracle")
    return [MethodConfig(kind, reward) for reward in every for kind in SEARCHES[:2]]


def components(setting: Setting) -> list[MethodConfig]:
    """Return the methods of table 4."""
    if not setting.reasons:
        return []
    usual = (
        MethodConfig("top-k"),
        MethodConfig("rcts", "weighted"),
        MethodConfig("rcts-random", "weighted"),
    )
    return [replace(config, rationales=shown) for config in usual for shown in (False, True)]


def alphas(setting: Setting) -> list[MethodConfig]:
    """Return the methods of table 5."""
    if not setting.reasons:
        return []
    return [MethodConfig(kind, "weighted", alpha) for alpha in ALPHAS for kind in SEARCHES[:2]]


def main_rewards(setting: Setting) -> tuple[Rewarding, ...]:
    return ("weighted", "ensemble", "oracle") if setting.reasons else ("ensemble", "oracle")


def rollouts(reward: Rewarding) -> list[MethodConfig]:
    """Return the methods of figure 5 (b)."""
    return [MethodConfig(kind, reward, rollouts=many) for many in ROLLOUTS for kind in SEARCHES[:2]]


def shapes(setting: Setting) -> list[MethodConfig]:
    """Return tree shapes, which the paper does not vary."""
    usual = MethodConfig("rcts", setting.reward)
    return [
        usual,
        *(
            replace(config, rollouts=16)
            for config in (usual, MethodConfig("rcts-random", setting.reward))
        ),
        *(replace(usual, children=many) for many in (1, 2, 5, 10)),
        replace(usual, parallel=4),
        *(replace(usual, exploration=much) for much in (0.0, 2.0)),
        replace(usual, released=True),
    ]


def shots(setting: Setting) -> list[MethodConfig]:
    usual = (
        MethodConfig("top-k"),
        MethodConfig("rcts", setting.reward),
        MethodConfig("rcts-random", setting.reward),
    )
    return [replace(config, shots=many) for many in (1, 3, 5) for config in usual]
