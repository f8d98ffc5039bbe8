"""Evaluations: list of runs, results of a run, and its items with the answers of each method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from starlette.responses import Response
from starlette.routing import Route

from bottega._util.progress import plural
from bottega.errors import BottegaError, NotFoundError
from bottega.evaluation.metrics.metric import labels_of
from bottega.evaluation.report.render import content_policy, settings_of, stream_view
from bottega.evaluation.report.runs import (
    Demonstration,
    Item,
    RecordedAnswer,
    RunProgress,
    read_thumbnail,
)
from bottega.evaluation.report.sections import ReportRow, Section, compare_rows
from bottega.openai_api.errors import ApiError
from bottega.pixels import media_type
from bottega.ui.background import RELOAD_SECONDS, BackgroundComputations
from bottega.ui.evaluation_runs import LoadedRun, RunLibrary, changed_at
from bottega.ui.pages import (
    HEADERS,
    IMAGE_HEADERS,
    Link,
    Page,
    PageResult,
    Renderer,
    Visit,
    require,
)

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

EVALUATIONS = Link("/evaluations", "Evaluations", for_admins=True)
RUNS_SHOWN = 30  # per page
ITEMS_SHOWN = 25  # per page
REFRESH_SECONDS = 3
SHOWN_METHODS = 6
MAX_SETTING_LENGTH = 500  # characters


@dataclass(frozen=True)
class RunEntry:
    """Run in the list, last changed at `changed` (unix seconds). `progress` is None if it cannot be
    read, for the reason in `problem`."""

    name: str
    changed: float
    progress: RunProgress | None
    problem: str = ""


@dataclass(frozen=True)
class EvaluationPages:
    """Handlers of the evaluations. `library` is None if no folder of runs is set."""

    library: RunLibrary | None
    background: BackgroundComputations = field(default_factory=BackgroundComputations)

    def browse(self, visit: Visit) -> PageResult:
        require(visit.user.sees_all, "see evaluations")
        first = visit.number("first", 0)
        found = {} if self.library is None else self.library.folders()
        newest = sorted(((changed_at(folder), name) for name, folder in found.items()))[::-1]
        entries = [
            self._entry(name, found[name], changed)
            for changed, name in newest[first : first + RUNS_SHOWN]
        ]
        running = any(one.progress is not None and one.progress.running for one in entries)
        return Page(
            "evaluations.html",
            {
                "title": "Evaluations",
                "configured": self.library is not None,
                "roots": [] if self.library is None else self.library.roots,
                "entries": entries,
                "count": len(found),
                "first": first,
                "following": first + RUNS_SHOWN if first + RUNS_SHOWN < len(found) else None,
                "refresh": REFRESH_SECONDS if running else 0,
                "shown_methods": SHOWN_METHODS,
            },
        )

    def show(self, visit: Visit) -> PageResult:
        opened = self._open(visit, traces=False)
        if opened is None:
            return _waiting(visit)
        loaded, progress = opened
        values = {
            "title": loaded.name,
            "name": loaded.name,
            "progress": progress,
            "changed": changed_at(loaded.run.folder),
            "refresh": REFRESH_SECONDS if progress.running else 0,
            "longest": MAX_SETTING_LENGTH,
        }
        if loaded.stream is not None:
            stream = stream_view(loaded.stream)
            return Page("evaluation_stream.html", {**values, "view": stream})
        assert loaded.section is not None
        settings = {name: value for name, [value] in settings_of(loaded.section).items()}
        values |= {"section": loaded.section, "chart": loaded.chart, "settings": settings}
        return Page("evaluation.html", values)

    def items(self, visit: Visit) -> PageResult:
        opened = self._open(visit)
        if opened is None:
            return _waiting(visit)
        loaded, _ = opened
        section = _section_of(loaded)
        chosen = _filter(visit, section)
        matches = chosen.matches(section)
        first = visit.number("first", 0)
        shown = [
            (index, section.items[index], [answer_of(row, index) for row in chosen.rows])
            for index in matches[first : first + ITEMS_SHOWN]
        ]
        return Page(
            "evaluation_items.html",
            {
                **_item_values(visit, loaded, chosen, section),
                "title": f"Items of {loaded.name}",
                "pair": compare_rows(section, *chosen.rows) if len(chosen.methods) == 2 else None,
                "metric": section.metric.replace("_", " "),
                "count": len(matches),
                "shown": shown,
                "first": first,
                "previous": max(0, first - ITEMS_SHOWN) if first else None,
                "following": first + ITEMS_SHOWN if first + ITEMS_SHOWN < len(matches) else None,
            },
        )

    def item(self, visit: Visit) -> PageResult:
        opened = self._open(visit)
        if opened is None:
            return _waiting(visit)
        loaded, _ = opened
        section = _section_of(loaded)
        index = visit.number("index", 0)
        if index >= len(section.items):
            raise NotFoundError(
                f"the run has {plural(len(section.items), 'item', ',')}, got the index {index}",
                hint="open the list of its items",
            )
        chosen = _filter(visit, section)
        matches = chosen.matches(section)
        item = section.items[index]
        return Page(
            "evaluation_item.html",
            {
                **_item_values(visit, loaded, chosen, section),
                "title": f"Item {index} of {loaded.name}",
                "index": index,
                "item": item,
                "labels": labels_of(item.example),
                "answers": [answer_of(row, index) for row in section.rows],
                "previous": max((one for one in matches if one < index), default=None),
                "following": min((one for one in matches if one > index), default=None),
            },
        )

    def image(self, visit: Visit) -> PageResult:
        library = self._library(visit)
        data = read_thumbnail(library.folder(visit.value("run")), visit.value("sha256"))
        if data is None:
            raise NotFoundError(
                "the run has no such image",
                hint="run its command again, which stores missing images",
            )
        return Response(data, 200, IMAGE_HEADERS, media_type(data))

    def report(self, visit: Visit) -> PageResult:
        """Return the page of `bottega report`, which its own content security policy isolates from
        the console."""
        library, name = self._library(visit), visit.value("run")
        folder = library.folder(name)
        page = self.background.result((folder, "report"), partial(library.report, name))
        if page is None:
            return _waiting(visit)
        headers = {**HEADERS, "content-security-policy": content_policy()}
        return Response(page, 200, headers, "text/html; charset=utf-8")

    def _entry(self, name: str, folder: Path, changed: float) -> RunEntry:
        assert self.library is not None
        try:
            return RunEntry(name, changed, self.library.progress(folder))
        except BottegaError as error:
            return RunEntry(name, changed, None, str(error))

    def _library(self, visit: Visit) -> RunLibrary:
        require(visit.user.sees_all, "see evaluations")
        if self.library is None:
            raise ApiError(
                "the console has no folder of runs",
                status=404,
                hint='set [console] runs = "FOLDER" in bottega.toml',
            )
        return self.library

    def _open(self, visit: Visit, *, traces: bool = True) -> tuple[LoadedRun, RunProgress] | None:
        """Return the chosen run, None while it is being loaded. While a run in progress is loaded
        again, its earlier state is returned. Raises `ApiError`, `NotFoundError` and
        `StoreError`."""
        library, name = self._library(visit), visit.value("run")
        folder = library.folder(name)
        progress = library.progress(folder)
        loaded = library.current(folder, traces=traces) or self.background.result(
            (folder, traces), partial(library.load, name, traces=traces)
        )
        if loaded is None and progress.running:
            loaded = library.cached(folder, traces=traces)
        return None if loaded is None else (loaded, progress)


def _waiting(visit: Visit) -> Page:
    values = {"title": visit.value("run")}
    return Page("evaluation_waiting.html", values, reload_seconds=RELOAD_SECONDS)


def evaluation_routes(renderer: Renderer, library: RunLibrary | None) -> list[Route]:
    pages, page = EvaluationPages(library), renderer.route
    return [
        page("/evaluations", pages.browse),
        page("/evaluations/run", pages.show),
        page("/evaluations/items", pages.items),
        page("/evaluations/item", pages.item),
        page("/evaluations/image", pages.image),
        page("/evaluations/report", pages.report),
    ]


def _section_of(loaded: LoadedRun) -> Section:
    if loaded.section is None:
        raise NotFoundError(
            "the console has no list of items for a run of streams",
            hint="open its results or its full report",
        )
    return loaded.section


def _filter(visit: Visit, section: Section) -> ItemFilter:
    methods = (visit.value("method"), visit.value("other"))
    show = visit.value("show")
    if show not in (*OUTCOMES, DISAGREE, ""):
        raise ApiError(f"show must be an outcome, got {show[:40]!r}", hint="choose one in the form")
    return ItemFilter.of(section, methods, show, visit.value("text"))


def _item_values(
    visit: Visit, loaded: LoadedRun, chosen: ItemFilter, section: Section
) -> dict[str, object]:
    return {
        "name": loaded.name,
        "images": loaded.images,
        "titles": [row.title for row in section.rows],
        "outcomes": [*OUTCOMES.items(), (DISAGREE, "methods disagree")],
        "item_count": section.item_count,
        "params": {
            "run": loaded.name,
            "method": visit.value("method"),
            "other": visit.value("other"),
            "show": chosen.show,
            "text": chosen.text,
        },
    }


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
