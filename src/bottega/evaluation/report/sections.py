"""Sections of a report: runs on the same items, broken down by label and tag."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from bottega._util.progress import Stages, Step, no_stages
from bottega.evaluation.methods.prompts import description_text
from bottega.evaluation.metrics.metric import (
    Estimate,
    Judgement,
    MacroF1,
    NotScored,
    labels_of,
    macro_f1,
    mean,
)
from bottega.evaluation.metrics.open_answers import Answerability
from bottega.evaluation.outcomes import ScoredAnswer, method_title
from bottega.evaluation.report.runs import AnswerKey, Item, RecordedAnswer, StoredRun
from bottega.evaluation.runs.paired import (
    PairedDifference,
    compare,
    is_other_baseline,
    paired_differences,
)
from bottega.evaluation.runs.run_store import SHOWN
from bottega.evaluation.runs.runner import Figure, MethodResult, summarize
from bottega.types import Example

MAX_GROUPS = 40
MAX_CONFUSED = 30
INVALID, OTHER = "(invalid)", "(another)"
# Minimum shares of the items in shown groups and in groups of several items: free answers would
# give each item a group of its own.
SHOWN_SHARE, SHARED = 0.5, 0.7
# Metrics of a whole set, and of items without answers, are not the mean of item scores.
SET_METRICS = ("macro", "answerability", NotScored.name)
ANSWERABILITY: Mapping[str, Literal["ap", "f1"]] = {
    "answerability_ap": "ap",
    "answerability_f1": "f1",
}


@dataclass(frozen=True)
class Cell:
    """Mean score of a row over a group."""

    n: int
    score: Estimate


@dataclass(frozen=True)
class Group:
    """Items with a label or tag; a cell is None if the row answered none of them."""

    name: str
    items: int
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Breakdown:
    """Groups by label or tag; `rest` joins the groups beyond `MAX_GROUPS`, of which there are
    `more`."""

    by: str
    groups: tuple[Group, ...]
    rest: Group | None
    more: int


@dataclass(frozen=True)
class Confusions:
    """Confusion matrix: `counts[i][j]` items of label i have the answer of column j."""

    row: ReportRow
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    left_out: int


def breakdowns(section: Section) -> list[Breakdown]:
    """Return breakdowns by label and by each tag with few enough values."""
    found = [_breakdown("label", section, labels_of)]
    tags = dict.fromkeys(tag for item in section.items for tag in item.example.tags)
    found += [_breakdown(tag, section, _of_tag(tag)) for tag in tags if tag != "episode"]
    return [one for one in found if one is not None]


def confusions(section: Section) -> Confusions | None:
    """Return the confusions of the best model row, if items have one of few labels."""
    examples = [item.example for item in section.items]
    counts = Counter(label for example in examples for label in labels_of(example))
    labels = tuple(label for label, _ in counts.most_common(MAX_CONFUSED))
    row = best(section.rows)
    single = all(len(labels_of(example)) == 1 for example in examples)
    if row is None or not single or len(labels) < 2 or not _is_informative(counts, len(examples)):
        return None
    answered = [(labels_of(one.item)[0], _answer_name(one)) for one in row.scored]
    pairs = Counter(
        (truth, predicted if predicted in (*labels, INVALID) else OTHER)
        for truth, predicted in answered
    )
    shown = {predicted for truth, predicted in pairs if truth in labels}
    columns = (*labels, *(name for name in (OTHER, INVALID) if name in shown))
    return Confusions(
        row,
        labels,
        columns,
        tuple(tuple(pairs[truth, predicted] for predicted in columns) for truth in labels),
        len(counts) - len(labels),
    )


def best(rows: Sequence[ReportRow]) -> ReportRow | None:
    """Return the best row by the metric; rows without a model only if there are no others."""
    scored = [row for row in rows if row.result.value is not None]
    with_model = [row for row in scored if row.result.calls] or scored
    return max(with_model, key=lambda row: row.result.value or 0.0, default=None)


def _answer_name(one: ScoredAnswer) -> str:
    if not one.answer.valid:
        return INVALID
    return ", ".join(one.answer.labels) or one.answer.text


def _of_tag(tag: str) -> Callable[[Example], tuple[str, ...]]:
    return lambda example: (example.tags[tag],) if tag in example.tags else ()


def _is_informative(counts: Counter[str], items: int) -> bool:
    shown = sum(n for _, n in counts.most_common(MAX_GROUPS))
    shared = sum(n for n in counts.values() if n > 1)
    return len(counts) > 1 and shown >= SHOWN_SHARE * items and shared >= SHARED * items


def _breakdown(
    by: str, section: Section, groups_of: Callable[[Example], tuple[str, ...]]
) -> Breakdown | None:
    counts = Counter(name for item in section.items for name in groups_of(item.example))
    if not counts or not _is_informative(counts, len(section.items)):
        return None
    names = [name for name, _ in counts.most_common(MAX_GROUPS)]
    cells = [_cells(row, groups_of, set(names)) for row in section.rows]
    groups = tuple(
        Group(name, counts[name], tuple(of_row.get(name) for of_row in cells)) for name in names
    )
    more = len(counts) - len(names)
    rest = sum(counts.values()) - sum(counts[name] for name in names)
    others = Group(OTHER, rest, tuple(of_row.get(OTHER) for of_row in cells)) if more else None
    return Breakdown(by, groups, others, more)


def _cells(
    row: ReportRow, groups_of: Callable[[Example], tuple[str, ...]], names: set[str]
) -> dict[str, Cell]:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for one in row.scored:
        for name in groups_of(one.item):
            scores[name if name in names else OTHER].append(one.score)
    return {name: Cell(len(some), mean(some, seed=0)) for name, some in scores.items()}


@dataclass(frozen=True)
class ReportRow:
    """Method of a run; `title` includes the run if it is `one_of_several` in its section.

    The `seconds` of its result are the sum over concurrent answers.
    """

    run: str
    one_of_several: bool
    model: str
    result: MethodResult
    answers: Mapping[int, RecordedAnswer]
    failures: Mapping[int, str]

    @property
    def method(self) -> str:
        return method_title(self.result.method, self.result.shots)

    @property
    def title(self) -> str:
        return f"{self.prefix}{self.method}"

    @property
    def prefix(self) -> str:
        return f"{self.run}: " if self.one_of_several else ""

    @property
    def scored(self) -> list[ScoredAnswer]:
        return [recorded.scored for recorded in self.answers.values()]

    @property
    def tokens(self) -> int:
        return self.result.prompt_tokens + self.result.completion_tokens

    def per_item(self, total: float | None) -> float | None:
        """Divide a sum over the answered items by their number."""
        return total / self.result.n if total is not None and self.result.n else None


@dataclass(frozen=True)
class Section:
    """Rows over the same items; `runs` are keyed by their names in the report."""

    benchmark: str
    items: tuple[Item, ...]
    metrics: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    pairs: tuple[PairedDifference, ...]
    runs: Mapping[str, StoredRun]

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def other_metrics(self) -> tuple[str, ...]:
        """Return the further metrics of all rows."""
        found = {one.metric for row in self.rows for one in row.result.also}
        return tuple(sorted(found, key=[*self.metrics, *sorted(found)].index))

    @property
    def item_count(self) -> int:
        return len(self.items)


def sections(runs: Mapping[str, StoredRun], stages: Stages = no_stages) -> list[Section]:
    """Group runs over the same items in the same order, which can be compared item by item."""
    groups: dict[object, dict[str, StoredRun]] = {}
    for name, run in runs.items():
        groups.setdefault(_identity(run), {})[name] = run
    with stages("scoring methods", sum(len(run.methods) for run in runs.values())) as step:
        return [_section(some, step) for some in groups.values()]


def estimate(metric: str, index: int, scored: Sequence[ScoredAnswer], seed: int) -> Estimate | None:
    """Return None without an answer, and for metrics that item scores do not determine."""
    if not scored:
        return None
    if metric == MacroF1.name:
        truth = [labels_of(one.item) for one in scored]
        predicted = [one.answer.labels for one in scored]
        labels = list(dict.fromkeys(label for some in (*truth, *predicted) for label in some))
        return macro_f1(truth, predicted, labels, seed=seed)
    if metric in ANSWERABILITY:
        judged = [Judgement(one.item, one.answer, one.scores[index]) for one in scored]
        return _answerability(metric, judged).estimate(judged, seed=seed)
    if metric.startswith(SET_METRICS):
        return None
    return mean([one.scores[index] for one in scored], seed=seed)


def _answerability(metric: str, judged: Sequence[Judgement]) -> Answerability:
    ids = {str(one.item.query.id) for one in judged if one.item.tags.get("answerable") == "0"}
    return Answerability(ids, ANSWERABILITY[metric])


def _identity(run: StoredRun) -> object:
    items = tuple(
        (item.example.query.text, item.images, item.example.query.choices, labels_of(item.example))
        for item in run.items
    )
    return run.settings["benchmark"], tuple(run.settings["metrics"]), items


def _section(runs: Mapping[str, StoredRun], step: Step) -> Section:
    some, several = next(iter(runs.values())), len(runs) > 1
    rows = []
    for name, run in runs.items():
        for key in run.methods:
            rows.append(_row(name, several, run, key))
            step(1)
    pairs = [*_within(rows), *_across(rows, _seed(some))]
    return Section(
        some.settings["benchmark"],
        some.items,
        tuple(some.settings["metrics"]),
        tuple(rows),
        tuple(pairs),
        runs,
    )


def _row(name: str, several: bool, run: StoredRun, key: AnswerKey) -> ReportRow:
    answers, failures = run.answers.get(key, {}), run.failures.get(key, {})
    model = "no model" if _calls_no_model(answers) else str(run.settings["model"])
    return ReportRow(
        name, several, model, _result(run, key, answers, len(failures)), answers, failures
    )


def _calls_no_model(answers: Mapping[int, RecordedAnswer]) -> bool:
    return bool(answers) and not any(recorded.scored.calls for recorded in answers.values())


def _result(
    run: StoredRun, key: AnswerKey, answers: Mapping[int, RecordedAnswer], failed: int
) -> MethodResult:
    scored = [recorded.scored for recorded in answers.values()]
    metrics: list[str] = run.settings["metrics"]
    found = {name: estimate(name, i, scored, _seed(run)) for i, name in enumerate(metrics)}
    return summarize(
        key,
        metrics[0],
        scored,
        [Figure(name, one.value, one.low, one.high) for name, one in found.items() if one],
        items=len(run.items),
        failed=failed,
        seconds=sum(recorded.seconds for recorded in answers.values()),
        seed=_seed(run),
    )


def _within(rows: Sequence[ReportRow]) -> list[PairedDifference]:
    """Return the comparisons of `bottega eval`, differences to the reference method first."""
    compared: list[tuple[str, PairedDifference]] = []
    for name in dict.fromkeys(row.run for row in rows):
        run_rows = [row for row in rows if row.run == name]
        for one in paired_differences([(row.result, row.scored) for row in run_rows]):
            compared.append((run_rows[0].prefix, one))
    compared.sort(key=lambda entry: is_other_baseline(entry[1]))
    return [
        replace(one, method=f"{prefix}{one.method}", against=f"{prefix}{one.against}")
        for prefix, one in compared
    ]


def _across(rows: Sequence[ReportRow], seed: int) -> list[PairedDifference]:
    """Compare each method at equal shots between a run and the previous one."""
    compared: list[PairedDifference] = []
    for key in dict.fromkeys((row.result.method, row.result.shots) for row in rows):
        same = [row for row in rows if (row.result.method, row.result.shots) == key]
        for before, after in pairwise(same):
            if before.result.metric.startswith(SET_METRICS):
                continue
            method, shots = key
            names = (f"{after.prefix}{method}", f"{before.prefix}{method}")
            found = compare(*names, shots, after.scored, before.scored, seed)
            compared += [] if found is None else [found]
    return compared


def compare_rows(section: Section, ours: ReportRow, theirs: ReportRow) -> PairedDifference | None:
    """Compare two rows on the items that both answered. Return None if there are none, and for
    metrics of a whole set."""
    if ours.result.metric.startswith(SET_METRICS):
        return None
    seed = _seed(section.runs[ours.run])
    return compare(ours.title, theirs.title, ours.result.shots, ours.scored, theirs.scored, seed)


def _seed(run: StoredRun) -> int:
    return int(run.settings.get("seed", 0))


def demonstration_texts(section: Section) -> list[str]:
    """Return a text for each run with descriptions of its methods."""
    several = len(section.runs) > 1
    texts = {
        name: description_text(run.settings.get(SHOWN, {})) for name, run in section.runs.items()
    }
    return [f"{name}: {text}" if several else text for name, text in texts.items() if text]
