"""From kept answers to the rows of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bottega.evaluation.labels import labels_of
from bottega.evaluation.metrics.intervals import Estimate, mean
from bottega.evaluation.metrics.labels import MacroF1, macro_f1
from bottega.evaluation.metrics.metric import Judged
from bottega.evaluation.metrics.vizwiz import Answerability
from bottega.evaluation.outcomes import Scored, titled
from bottega.evaluation.pairing import Paired, compare, paired
from bottega.evaluation.report.reading import Given, Item, KeptRun, Key
from bottega.evaluation.tally import Figure, Result, summed

# Figures of a set as a whole are not the mean of its items' scores.
WHOLE = ("macro", "answerability")
ANSWERABILITY: Mapping[str, Literal["ap", "f1"]] = {
    "answerability_ap": "ap",
    "answerability_f1": "f1",
}


@dataclass(frozen=True)
class Row:
    """One method of one run; `title` names the run too if it is `one_of_several` in its section.
    Its result's `seconds` are the sum of its answers' times, which may have been waited for
    together."""

    run: str
    one_of_several: bool
    model: str
    result: Result
    answers: Mapping[int, Given]
    failures: Mapping[int, str]

    @property
    def method(self) -> str:
        return titled(self.result.method, self.result.shots)

    @property
    def title(self) -> str:
        return f"{self.prefix}{self.method}"

    @property
    def prefix(self) -> str:
        return f"{self.run}: " if self.one_of_several else ""

    @property
    def scored(self) -> list[Scored]:
        return [given.scored for given in self.answers.values()]

    @property
    def tokens(self) -> int:
        return self.result.prompt_tokens + self.result.completion_tokens

    def each(self, total: float | None) -> float | None:
        """Of a sum over the answered items, what an item has of it."""
        return total / self.result.n if total is not None and self.result.n else None


@dataclass(frozen=True)
class Section:
    """The rows that asked the same items; `runs` by the name that the report gives them."""

    benchmark: str
    items: tuple[Item, ...]
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    pairs: tuple[Paired, ...]
    runs: Mapping[str, KeptRun]

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def further(self) -> tuple[str, ...]:
        """What some row has beside its metric."""
        found = {one.metric for row in self.rows for one in row.result.also}
        return tuple(sorted(found, key=[*self.metrics, *sorted(found)].index))

    @property
    def asked(self) -> int:
        return len(self.items)


def sections(runs: Mapping[str, KeptRun]) -> list[Section]:
    """Runs that asked the same items in the same order stand together, so that they can be compared
    item by item."""
    together: dict[object, dict[str, KeptRun]] = {}
    for name, run in runs.items():
        together.setdefault(_identity(run), {})[name] = run
    return [_section(some) for some in together.values()]


def estimate(metric: str, place: int, scored: Sequence[Scored], seed: int) -> Estimate | None:
    """None without an answer, and for a figure that the items' scores alone do not give."""
    if not scored:
        return None
    if metric == MacroF1.name:
        truth = [labels_of(one.item) for one in scored]
        said = [one.answer.labels for one in scored]
        labels = list(dict.fromkeys(label for some in (*truth, *said) for label in some))
        return macro_f1(truth, said, labels, seed=seed)
    if metric in ANSWERABILITY:
        judged = [Judged(one.item, one.answer, one.scores[place]) for one in scored]
        return _answerability(metric, judged).estimate(judged, seed=seed)
    if metric.startswith(WHOLE):
        return None
    return mean([one.scores[place] for one in scored], seed=seed)


def _answerability(metric: str, judged: Sequence[Judged]) -> Answerability:
    ids = {str(one.item.query.id) for one in judged if one.item.tags.get("answerable") == "0"}
    return Answerability(ids, ANSWERABILITY[metric])


def _identity(run: KeptRun) -> object:
    items = tuple(
        (item.example.query.text, item.images, item.example.query.choices, labels_of(item.example))
        for item in run.items
    )
    return run.settings["benchmark"], tuple(run.settings["metrics"]), items


def _section(runs: Mapping[str, KeptRun]) -> Section:
    some, several = next(iter(runs.values())), len(runs) > 1
    rows = [_row(name, several, run, key) for name, run in runs.items() for key in run.methods]
    pairs = [*_within(rows), *_across(rows, _seed(some))]
    return Section(
        some.settings["benchmark"],
        some.items,
        tuple(some.settings["metrics"]),
        tuple(rows),
        tuple(pairs),
        runs,
    )


def _row(name: str, several: bool, run: KeptRun, key: Key) -> Row:
    answers, failures = run.answers.get(key, {}), run.failures.get(key, {})
    model = "no model" if _asks_none(answers) else str(run.settings["model"])
    return Row(name, several, model, _result(run, key, answers, len(failures)), answers, failures)


def _asks_none(answers: Mapping[int, Given]) -> bool:
    return bool(answers) and not any(given.scored.calls for given in answers.values())


def _result(run: KeptRun, key: Key, answers: Mapping[int, Given], failed: int) -> Result:
    scored = [given.scored for given in answers.values()]
    metrics: list[str] = run.settings["metrics"]
    found = {name: estimate(name, i, scored, _seed(run)) for i, name in enumerate(metrics)}
    return summed(
        key,
        metrics[0],
        scored,
        [Figure(name, one.value, one.low, one.high) for name, one in found.items() if one],
        asked=len(run.items),
        failed=failed,
        seconds=sum(given.seconds for given in answers.values()),
        seed=_seed(run),
    )


def _within(rows: Sequence[Row]) -> list[Paired]:
    """What `bottega eval` compares."""
    compared: list[Paired] = []
    for name in dict.fromkeys(row.run for row in rows):
        of_run = [row for row in rows if row.run == name]
        for one in paired([(row.result, row.scored) for row in of_run]):
            prefix = of_run[0].prefix
            compared.append(_renamed(one, f"{prefix}{one.method}", f"{prefix}{one.against}"))
    return compared


def _across(rows: Sequence[Row], seed: int) -> list[Paired]:
    """The same method at the same number of shots, of each run and the one before it."""
    compared: list[Paired] = []
    for key in dict.fromkeys((row.result.method, row.result.shots) for row in rows):
        same = [row for row in rows if (row.result.method, row.result.shots) == key]
        for before, after in pairwise(same):
            if before.result.metric.startswith(WHOLE):
                continue
            method, shots = key
            names = (f"{after.prefix}{method}", f"{before.prefix}{method}")
            found = compare(*names, shots, after.scored, before.scored, seed)
            compared += [] if found is None else [found]
    return compared


def _renamed(one: Paired, method: str, against: str) -> Paired:
    return Paired(method, against, one.shots, one.n, one.value, one.low, one.high, one.p_value)


def _seed(run: KeptRun) -> int:
    return int(run.settings.get("seed", 0))
