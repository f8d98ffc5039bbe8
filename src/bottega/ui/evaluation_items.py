"""Items of a run: filters, and the answers of each method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bottega.errors import NotFoundError
from bottega.evaluation.metrics.metric import labels_of
from bottega.evaluation.report.runs import Demonstration, Item, RecordedAnswer
from bottega.evaluation.report.sections import ReportRow, Section

ItemOutcome = Literal["right", "partly", "wrong", "invalid", "failed", "missing"]
OUTCOMES: Mapping[ItemOutcome, str] = {
    "right": "right",
    "partly": "partly right",
    "wrong": "wrong",
    "invalid": "invalid reply",
    "failed": "failed",
    "missing": "not answered",
}
DISAGREE = "disagree"
INVALID = object()  # in place of the text of invalid replies: they all agree


@dataclass(frozen=True)
class MethodAnswer:
    """Answer of a method to an item. `text` is the parsed answer, `error` the message of a failed
    item; `recorded` is None for failed and missing answers."""

    title: str
    outcome: ItemOutcome
    text: str = ""
    error: str = ""
    recorded: RecordedAnswer | None = None

    @property
    def name(self) -> str:
        return OUTCOMES[self.outcome]

    @property
    def replies(self) -> Sequence[tuple[str, int]]:
        """Return the distinct replies with their counts; none if the only one equals the answer."""
        replies = () if self.recorded is None else self.recorded.replies
        counts = Counter(replies)
        return [] if list(counts.items()) == [(self.text, 1)] else list(counts.items())

    @property
    def rationale(self) -> str:
        """Return the rationale, or "" if a reply contains it."""
        if self.recorded is None:
            return ""
        rationale = self.recorded.scored.answer.rationale or ""
        return "" if any(rationale in reply for reply in self.recorded.replies) else rationale

    @property
    def shown(self) -> Sequence[Demonstration]:
        return () if self.recorded is None else self.recorded.shown


def answer_of(row: ReportRow, index: int) -> MethodAnswer:
    """Return the answer of a row's method to the item `index`."""
    title = row.title
    if index in row.failures:
        return MethodAnswer(title, "failed", error=row.failures[index])
    recorded = row.answers.get(index)
    if recorded is None:
        return MethodAnswer(title, "missing")
    scored = recorded.scored
    text = ", ".join(scored.answer.labels) or scored.answer.text
    outcome: ItemOutcome = "partly"
    if not scored.answer.valid:
        outcome = "invalid"
    elif scored.score in (0.0, 1.0):
        outcome = "right" if scored.correct else "wrong"
    return MethodAnswer(title, outcome, text, recorded=recorded)


@dataclass(frozen=True)
class ItemFilter:
    """Filter of items. `methods` are titles of rows, none for all. `show` is an outcome that one of
    them must have, or `DISAGREE`; `text` must occur in the item or in an answer."""

    methods: Sequence[str] = ()
    show: str = ""
    text: str = ""
    rows: Sequence[ReportRow] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, section: Section, methods: Sequence[str], show: str, text: str) -> ItemFilter:
        """Return the filter for a run. Raises `NotFoundError` if it has no such method."""
        titles = {row.title: row for row in section.rows}
        wanted = tuple(dict.fromkeys(filter(None, methods)))
        for title in wanted:
            if title not in titles:
                raise NotFoundError(
                    f"the run has no answers of {title[:60]!r}", hint="choose another method"
                )
        rows = [titles[title] for title in wanted] or list(section.rows)
        return cls(wanted, show, text, rows=rows)

    def matches(self, section: Section) -> list[int]:
        """Return the indices of the matching items."""
        text = self.text.strip().casefold()
        return [
            index
            for index, item in enumerate(section.items)
            if self._has_outcome(index) and (not text or self._has_text(text, item, index))
        ]

    def _has_outcome(self, index: int) -> bool:
        if not self.show:
            return True
        answers = [answer_of(row, index) for row in self.rows]
        if self.show == DISAGREE:
            texts = [
                INVALID if one.outcome == "invalid" else one.text
                for one in answers
                if one.recorded is not None
            ]
            return len(set(texts)) > 1
        outcomes = {one.outcome for one in answers}
        return self.show in outcomes or (self.show == "wrong" and "invalid" in outcomes)

    def _has_text(self, text: str, item: Item, index: int) -> bool:
        example = item.example
        tags = (f"{name}: {value}" for name, value in example.tags.items())
        own = (example.query.text, *example.query.choices, *labels_of(example), *tags)
        if any(text in one.casefold() for one in own):
            return True
        answers = (answer_of(row, index) for row in self.rows)
        return any(
            text in one.casefold()
            for answer in answers
            for one in (answer.text, answer.error, *(reply for reply, _ in answer.replies))
        )
