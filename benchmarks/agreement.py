"""Agreement, share and alarms of `AgreementBound` in simulated streams:
python benchmarks/agreement.py [--quick] [--seed N] [--streams N] [--only SCENARIO,...]

Each request of a stream has a score in [0, 1], beta(2, 2) distributed, and a probability that both
answers agree, which the bound does not know. The target is 0.95 of all replies, the confidence
95 %, a stream 10,000 requests. Prints a row per scenario and mode and the requirements; exits with
1 if one is missed. A count may exceed 5 % of the streams by their binomial error (97.5 %).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from bottega.routing.agreement_bound import BINS, WINDOW, AgreementBound, BoundMode

TARGET, RISK = 0.95, 0.05
LENGTH, SHORT = 10_000, 300
STREAMS, QUICK_STREAMS = 200, 40
GRACE = 200  # requests after a sudden change that are not judged
POPULATION = 400_000

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def agreement(kind: str, scores: Floats) -> Floats:
    """Return the probability of agreement at each score."""
    match kind:
        case "easy":
            return 0.995 / (1 + np.exp(-14 * (scores - 0.3)))
        case "mid":
            return 0.5 + 0.49 / (1 + np.exp(-12 * (scores - 0.55)))
        case "flat":
            return np.full_like(scores, 0.9)
        case "hard":
            return 0.3 + 0.6 * scores
    return np.full_like(scores, 0.5)  # hopeless


@dataclass(frozen=True)
class Scenario:
    """Kind of stream: its curve of agreement, and how it changes."""

    curve: str
    change: str = ""
    length: int = LENGTH

    @property
    def changed_at(self) -> int | None:
        return self.length // 2 if self.change in ("sudden", "served") else None

    def stream(self, seed: int) -> tuple[Floats, Floats, Bools, Floats]:
        """Return scores, probabilities of agreement, differences and uniform numbers."""
        rng = np.random.default_rng(seed)
        scores = rng.beta(2, 2, self.length)
        if self.change in ("up", "down"):
            scores = np.sort(scores)[:: 1 if self.change == "up" else -1]
        agrees = agreement(self.curve, scores)
        position = np.arange(self.length)
        late = position >= self.length // 2
        if self.change == "sudden":
            agrees = np.where(late, 0.8 * agrees, agrees)
        elif self.change == "served":  # only where the apprentice answers
            agrees = np.where(late & (scores >= 0.5), agrees - 0.2, agrees)
        elif self.change == "slow":
            begun = np.clip((position / self.length - 0.3) / 0.7, 0, 1)
            agrees = agrees * (1 - 0.25 * begun)
        return scores, agrees, rng.random(self.length) >= agrees, rng.random(self.length)


SCENARIOS = {
    "easy": Scenario("easy"),
    "mid": Scenario("mid"),
    "flat": Scenario("flat"),
    "hard": Scenario("hard"),
    "hopeless": Scenario("hopeless"),
    "short easy": Scenario("easy", length=SHORT),
    "short mid": Scenario("mid", length=SHORT),
    "sorted down": Scenario("mid", "down"),
    "sorted up": Scenario("mid", "up"),
    "sudden": Scenario("mid", "sudden"),
    "served only": Scenario("mid", "served"),
    "slow": Scenario("mid", "slow"),
}
STATIONARY = ("easy", "mid", "flat", "hard")
LEAST_SHARES = {"easy": 0.80, "mid": 0.70, "flat": 0.60, "hard": 0.55}  # of the oracle's
BOUNDED = (*STATIONARY, "short easy", "short mid", "sorted down", "sorted up")
MOST_COMPARED = 0.045
SLOWEST_ALARM = 350
LOWEST_WINDOW: dict[BoundMode, float] = {"standard": 0.88, "careful": 0.91}


class Outcome(NamedTuple):
    """Figures of one stream: the lowest threshold in force (`BINS`: none), the least expected
    agreement of `WINDOW` replies, the mean expected agreement, shares of the second half, alarms,
    and requests from the change to the first alarm after it."""

    threshold: int
    lowest: float
    agreement: float
    served: float
    compared: float
    alarms: int
    delay: float


def simulate(name: str, mode: BoundMode, seed: int) -> Outcome:
    """Run one stream through the bound."""
    scenario = SCENARIOS[name]
    scores, agrees, differences, chances = scenario.stream(seed)
    bound = AgreementBound(TARGET, 0.95, mode=mode)
    served, compared = np.zeros((2, scenario.length), bool)
    lowest, alarms = BINS, []
    for index in range(scenario.length):
        draw = bound.draw(float(scores[index]), float(chances[index]))
        served[index], compared[index] = draw.served, draw.compared
        lowest, epoch = min(lowest, bound.threshold), bound.epoch
        bound.add(draw, bool(differences[index]) if draw.compared else None)
        if bound.epoch > epoch:
            alarms.append(index)
    risk = served * (1 - agrees)
    half, change = scenario.length // 2, scenario.changed_at
    late = [one for one in alarms if change is not None and one >= change]
    return Outcome(
        lowest,
        _lowest_window(risk, served, change),
        float(1 - risk.mean()),
        float((served & ~compared)[half:].mean()),
        float((served & compared)[half:].mean()),
        len(alarms),
        float(late[0] - (change or 0)) if late else float(half),
    )


def _lowest_window(risk: Floats, served: Bools, change: int | None) -> float:
    """Return the least expected agreement of `WINDOW` replies in a row from the first served one
    on; of those around a sudden change, only windows from `GRACE` requests after it."""
    size = min(WINDOW, len(risk))
    sums = np.concatenate([[0.0], np.cumsum(risk)])
    windows = 1 - (sums[size:] - sums[:-size]) / size
    starts = np.arange(len(windows))
    first = min(int(served.argmax()) if served.any() else len(risk), len(risk) - size)
    judged = starts >= first
    if change is not None:
        judged &= (starts + size <= change) | (starts >= change + GRACE)
    return float(windows[judged].min(initial=1.0))


def population_risks(curve: str) -> Floats:
    """Return the true risk of each threshold 0 ... `BINS`."""
    scores = np.random.default_rng(1).beta(2, 2, POPULATION)
    risk = 1 - agreement(curve, scores)
    return np.array([float(risk[scores >= bin / BINS].sum()) for bin in range(BINS + 1)]) / len(
        risk
    )


def oracle_share(curve: str) -> float:
    """Return the share above the lowest continuous threshold whose true risk is at most `RISK`."""
    scores = np.sort(np.random.default_rng(1).beta(2, 2, POPULATION))[::-1]
    risks = np.cumsum(1 - agreement(curve, scores)) / len(scores)
    return float(np.searchsorted(risks, RISK) / len(scores))


class Requirement(NamedTuple):
    name: str
    value: float
    limit: float
    is_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        relation = ">=" if self.is_least else "<="
        state = "met" if self.met else "MISSED"
        return f"{self.name:62} {self.value:8.3f} {relation} {self.limit:7.3f}  {state}"


def requirements(name: str, mode: BoundMode, outcomes: Sequence[Outcome]) -> Iterator[Requirement]:
    """Yield the requirements of a scenario."""
    scenario, shown = SCENARIOS[name], f"{name}, {mode}"
    streams = len(outcomes)
    most = float(binom.ppf(0.975, streams, 0.05))
    below = float(sum(one.lowest < TARGET for one in outcomes))
    served = float(np.mean([one.served for one in outcomes]))
    lowest = float(np.quantile([one.lowest for one in outcomes], 0.05))
    if name in STATIONARY:
        risks = population_risks(scenario.curve)
        false = sum(risks[one.threshold] > RISK for one in outcomes)
        yield Requirement(f"{shown}: streams with a false certificate", float(false), most)
    if name in BOUNDED:
        yield Requirement(f"{shown}: streams with 500 replies below target", below, most)
    if name in STATIONARY and mode == "standard":
        share = served / oracle_share(scenario.curve)
        compared = float(np.mean([one.compared for one in outcomes]))
        yield Requirement(f"{shown}: share of the oracle's", share, LEAST_SHARES[name], True)
        yield Requirement(f"{shown}: compared by the master", compared, MOST_COMPARED)
    if name == "hopeless":
        yield Requirement(f"{shown}: share", served, 0.01)
    if name == "sudden" and mode == "careful":
        yield Requirement(f"{shown}: streams with 500 replies below target", below, most)
    if name == "sudden" and mode == "standard":
        delay = float(np.median([one.delay for one in outcomes]))
        yield Requirement(f"{shown}: median requests to the alarm", delay, SLOWEST_ALARM)
    if name in ("served only", "slow"):
        whole = float(np.mean([one.agreement >= TARGET for one in outcomes]))
        yield Requirement(f"{shown}: whole streams at the target", whole, 0.95, True)
        yield Requirement(
            f"{shown}: 5 % quantile of the lowest 500 replies", lowest, LOWEST_WINDOW[mode], True
        )


def row(name: str, mode: BoundMode, outcomes: Sequence[Outcome]) -> str:
    """Return the figures of a scenario, for the table."""
    figures: list[Callable[[Outcome], float]] = [
        lambda one: one.agreement,
        lambda one: one.served,
        lambda one: one.compared,
        lambda one: float(one.lowest < TARGET),
        lambda one: float(one.alarms > 0),
    ]
    means = " | ".join(f"{np.mean([of(one) for one in outcomes]):.3f}" for of in figures)
    worst = np.quantile([one.lowest for one in outcomes], 0.05)
    delay = (
        ""
        if SCENARIOS[name].changed_at is None
        else f"{np.median([o.delay for o in outcomes]):.0f}"
    )
    return f"| {name} | {mode} | {means} | {worst:.3f} | {delay} |"


COLUMNS = (
    "stream",
    "mode",
    "agreement",
    "served, second half",
    "compared there",
    "streams with 500 replies below target",
    "streams with an alarm",
    "5 % quantile of the lowest 500",
    "requests to the alarm",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams each")
    parser.add_argument("--streams", type=int, help=f"streams each (default: {STREAMS})")
    parser.add_argument("--seed", type=int, default=0, help="of the first stream (default: 0)")
    parser.add_argument("--only", help="scenarios, separated by commas (default: all)")
    arguments = parser.parse_args()
    count = arguments.streams or (QUICK_STREAMS if arguments.quick else STREAMS)
    names = arguments.only.split(",") if arguments.only else list(SCENARIOS)
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"unknown scenario {unknown.pop()!r}, known are {', '.join(SCENARIOS)}")
    print(f"{count} streams each, seed {arguments.seed}\n{HEADER}", flush=True)
    judged: list[Requirement] = []
    with ProcessPoolExecutor() as pool:
        for name in names:
            for mode in ("standard", "careful"):
                seeds = range(arguments.seed * 1000, arguments.seed * 1000 + count)
                outcomes = list(
                    pool.map(simulate, [name] * count, [mode] * count, seeds, chunksize=5)
                )
                print(row(name, mode, outcomes), flush=True)
                judged += requirements(name, mode, outcomes)
    print(*judged, sep="\n")
    sys.exit(0 if all(one.met for one in judged) else 1)


if __name__ == "__main__":
    main()
