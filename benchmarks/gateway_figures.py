"""Measurements of one run of benchmarks/gateway.py, and tables and limits over many runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

COLUMNS = (
    *("body", "at once", "server", "CPU ms a request", "requests/s"),
    *("p50 ms", "p99 ms", "longest ms", "requests", "errors"),
)
OUTLIERS = 10.0
"""Limit of the 99th percentile, in medians."""


@dataclass(frozen=True)
class Run:
    """Times of one run in milliseconds; `cpu` is per request of the server processes."""

    round: int
    case: str
    body: str
    concurrency: int
    requests: int
    errors: int
    cpu: float
    rate: float
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{figure(self.median)} ({figure(self.low)} to {figure(self.high)})"


def figure(value: float) -> str:
    """Format a number with three significant digits."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Bar:
    name: str
    body: str
    concurrency: int
    value: Spread
    bar: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the requirement is met; None without a requirement."""
        if self.bar is None:
            return None
        median = self.value.median
        return median >= self.bar if self.at_least else median <= self.bar

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.met else "MISSED"
        limit = "" if self.bar is None else f"{sign} {self.bar:<4g} {verdict}"
        where = f"{self.body}, {self.concurrency} at once"
        return f"{self.name:42} {where:18} {self.value!s:28} {limit}".rstrip()

    def document(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}


Chosen = dict[int, Run]
"""The runs of one case, one body and one concurrency, by their round."""


class Figures:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def places(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys((run.body, run.concurrency) for run in self.runs))

    def of(self, case: str, body: str, concurrency: int) -> Chosen:
        wanted = (case, body, concurrency)
        return {r.round: r for r in self.runs if (r.case, r.body, r.concurrency) == wanted}

    def rows(self) -> Iterator[str]:
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        for body, concurrency in self.places():
            for case in dict.fromkeys(run.case for run in self.runs):
                if runs := list(self.of(case, body, concurrency).values()):
                    yield f"| {body} | {concurrency} | {case} | {_row(runs)} |"

    def ratio(
        self, name: str, case: str, peer: str, bar: float | None, *, at_least: bool = False
    ) -> Iterator[Bar]:
        """Return ratios of CPU time, each against the peer's run of the same round."""
        for body, concurrency in self.places():
            ours, theirs = self.of(case, body, concurrency), self.of(peer, body, concurrency)
            found = [ours[one].cpu / theirs[one].cpu for one in ours if one in theirs]
            if found:
                yield Bar(name, body, concurrency, Spread.over(found), bar, at_least)

    def outliers(self, case: str) -> Iterator[Bar]:
        for body, concurrency in self.places():
            if runs := self.of(case, body, concurrency):
                value = Spread.over([run.p99 / run.p50 for run in runs.values()])
                yield Bar(f"{case}: p99 / p50", body, concurrency, value, OUTLIERS)


def _row(runs: Sequence[Run]) -> str:
    def over(read: Callable[[Run], float]) -> str:
        return str(Spread.over([read(run) for run in runs]))

    times = [over(lambda r: r.cpu), over(lambda r: r.rate), over(lambda r: r.p50)]
    times += [over(lambda r: r.p99), figure(max(run.longest for run in runs))]
    counts = [str(sum(run.requests for run in runs)), str(sum(run.errors for run in runs))]
    return " | ".join([*times, *counts])
