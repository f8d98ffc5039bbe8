"""Where a method is right: by label, by tag, and what it takes for what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.evaluation.labels import labels_of
from bottega.evaluation.metrics.intervals import Estimate, mean
from bottega.evaluation.outcomes import Scored
from bottega.evaluation.report.figures import Row, Section
from bottega.types import Example

MOST_GROUPS = 40
MOST_CONFUSED = 30
INVALID, OTHER = "(invalid)", "(another)"
# Shares of the items that the groups shown, and those of more than one item, must hold together:
# else labels name single items, as free answers do.
SHOWN, SHARED = 0.5, 0.7


@dataclass(frozen=True)
class Cell:
    n: int
    score: Estimate


@dataclass(frozen=True)
class Group:
    """The items with this label or tag; None where a row answered none of them."""

    name: str
    items: int
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Breakdown:
    """`rest` joins the groups beyond `MOST_GROUPS`, of which there are `more`."""

    by: str
    groups: tuple[Group, ...]
    rest: Group | None
    more: int


@dataclass(frozen=True)
class Confusions:
    """`counts[i][j]`: how many items of label i were answered with column j."""

    row: Row
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    left_out: int


def breakdowns(section: Section) -> list[Breakdown]:
    """By label first, where labels are few enough to say something; then by each such tag."""
    found = [_breakdown("label", section, labels_of)]
    tags = dict.fromkeys(tag for item in section.items for tag in item.example.tags)
    found += [_breakdown(tag, section, _of_tag(tag)) for tag in tags if tag != "episode"]
    return [one for one in found if one is not None]


def confusions(section: Section) -> Confusions | None:
    """Of the best row that a model answered, where each item has one label of a few."""
    examples = [item.example for item in section.items]
    counts = Counter(label for example in examples for label in labels_of(example))
    labels = tuple(label for label, _ in counts.most_common(MOST_CONFUSED))
    row = best(section.rows)
    single = all(len(labels_of(example)) == 1 for example in examples)
    if row is None or not single or len(labels) < 2 or not _tells(counts, len(examples)):
        return None
    answered = [(labels_of(one.item)[0], _said(one)) for one in row.scored]
    pairs = Counter(
        (truth, said if said in (*labels, INVALID) else OTHER) for truth, said in answered
    )
    shown = {said for truth, said in pairs if truth in labels}
    columns = (*labels, *(name for name in (OTHER, INVALID) if name in shown))
    return Confusions(
        row,
        labels,
        columns,
        tuple(tuple(pairs[truth, said] for said in columns) for truth in labels),
        len(counts) - len(labels),
    )


def best(rows: Sequence[Row]) -> Row | None:
    """By the metric; a row without a model only where no other is."""
    known = [row for row in rows if row.result.value is not None]
    asked = [row for row in known if row.result.calls] or known
    return max(asked, key=lambda row: row.result.value or 0.0, default=None)


def _said(one: Scored) -> str:
    if not one.answer.valid:
        return INVALID
    return ", ".join(one.answer.labels) or one.answer.text


def _of_tag(tag: str) -> Callable[[Example], tuple[str, ...]]:
    return lambda example: (example.tags[tag],) if tag in example.tags else ()


def _tells(counts: Counter[str], items: int) -> bool:
    shown = sum(n for _, n in counts.most_common(MOST_GROUPS))
    shared = sum(n for n in counts.values() if n > 1)
    return len(counts) > 1 and shown >= SHOWN * items and shared >= SHARED * items


def _breakdown(
    by: str, section: Section, groups_of: Callable[[Example], tuple[str, ...]]
) -> Breakdown | None:
    counts = Counter(name for item in section.items for name in groups_of(item.example))
    if not counts or not _tells(counts, len(section.items)):
        return None
    names = [name for name, _ in counts.most_common(MOST_GROUPS)]
    cells = [_cells(row, groups_of, set(names)) for row in section.rows]
    groups = tuple(
        Group(name, counts[name], tuple(of_row.get(name) for of_row in cells)) for name in names
    )
    more = len(counts) - len(names)
    rest = sum(counts.values()) - sum(counts[name] for name in names)
    others = Group(OTHER, rest, tuple(of_row.get(OTHER) for of_row in cells)) if more else None
    return Breakdown(by, groups, others, more)


def _cells(
    row: Row, groups_of: Callable[[Example], tuple[str, ...]], names: set[str]
) -> dict[str, Cell]:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for one in row.scored:
        for name in groups_of(one.item):
            scores[name if name in names else OTHER].append(one.score)
    return {name: Cell(len(some), mean(some, seed=0)) for name, some in scores.items()}
