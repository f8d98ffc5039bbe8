"""What `bottega rationales` has made, and says at its end: Table 6 of RCTS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from bottega.cli.output import Step, note, print_json, print_table, say, warn
from bottega.evaluation.metrics.intervals import mean
from bottega.rationales import Made, Todo

SHOWN_FAILURES = 10
COLUMNS = ("rationales", "of", "n", "accuracy", "low", "high")
EXPLAINED = (
    "accuracy is the share of right predictions, with 95 % intervals over entries: of all entries,"
    " the rejected ones as 0 (RCTS, Table 6); of those whose rationale was kept, which these"
    " predictions chose; and of the mean of all candidates that were tried"
)

Figure = Mapping[str, float | int | None]


@dataclass
class Run:
    """What was made, and who is told of it."""

    made: list[Made] = field(default_factory=list)
    step: Step = lambda steps, cost_usd=0.0, /: None

    def done(self, id: str, made: Made) -> None:
        self.made.append(made)
        self.step(1, made.cost_usd or 0.0)
        if made.error is not None and self.failed <= SHOWN_FAILURES:
            warn(made.error, about=id)

    @property
    def scores(self) -> list[float]:
        return [one.score for one in self.made if one.rationale is not None]

    @property
    def failed(self) -> int:
        return sum(one.error is not None for one in self.made)

    @property
    def rejected(self) -> int:
        return len(self.made) - len(self.scores) - self.failed

    @property
    def cost_usd(self) -> float | None:
        costs = [one.cost_usd for one in self.made]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    @property
    def candidates(self) -> list[float]:
        """Of each example the mean share of the candidates that were tried."""
        return [fmean(one.tried) for one in self.made if one.tried and one.error is None]

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.made)

    def tokens(self) -> tuple[int, int]:
        usages = [one.usage for one in self.made]
        return (
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )


def report(found: Todo, run: Run, json: bool) -> None:
    """Of this run, and of all that the file holds."""
    rows = {"this run": _row(run.scores, run.rejected, run.candidates)}
    if found.scores or found.rejected:
        rows["with earlier ones"] = _row(
            [*found.scores, *run.scores], found.rejected + run.rejected
        )
    given, written = run.tokens()
    spent = {
        "failed": run.failed,
        "requests": run.total("requests"),
        "calls": run.total("calls"),
        "verified": run.total("verified"),
        "prompt_tokens": given,
        "completion_tokens": written,
        "cost_usd": run.cost_usd,
    }
    left = len(found.ids) - len(run.made) + run.failed
    rejected = found.rejected + run.rejected
    if json:
        whose = {
            "left": left,
            "rejected": rejected,
            "given": found.given,
            "passages": found.passages,
        }
        print_json({"rows": rows, **spent, **whose})
        return
    table = [(whose, of, *figure.values()) for whose in rows for of, figure in rows[whose].items()]
    print_table(COLUMNS, table)
    price = "at an unknown price" if run.cost_usd is None else f"for {run.cost_usd:.4f} USD"
    say(
        f"{len(run.scores)} kept, {run.rejected} rejected, {run.failed} failed;"
        f" {spent['requests']} requests, {spent['calls']} calls, {given} tokens in, {written} out,"
        f" {price}"
    )
    if rejected:
        note(f"{rejected} were tried in vain, now or earlier; --again tries them once more")
    note(
        f"{left} examples are left, whatever --limit says, {found.given} came with a rationale,"
        f" {found.passages} have no answer; {EXPLAINED}"
    )


def _row(
    kept: Sequence[float], rejected: int, candidates: Sequence[float] | None = None
) -> dict[str, Figure]:
    """What candidates were worth is not stored, so that it is known of this run alone."""
    row = {"entries": _figure([*kept, *[0.0] * rejected]), "kept": _figure(kept)}
    return row if candidates is None else {**row, "candidates": _figure(candidates)}


def _figure(scores: Sequence[float]) -> Figure:
    figure = mean(scores, seed=0) if scores else None
    return {
        "n": len(scores),
        "accuracy": figure.value if figure else None,
        "low": figure.low if figure else None,
        "high": figure.high if figure else None,
    }
