"""Tables of a report as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product

from bottega._util.progress import plural
from bottega.evaluation.methods.retrieval import EXCLUSION_RULE
from bottega.evaluation.metrics.metric import bounds
from bottega.evaluation.report.references import references
from bottega.evaluation.report.runs import StoredRun
from bottega.evaluation.report.sections import ReportRow, Section, demonstration_texts
from bottega.evaluation.report.stream_sections import COLUMNS as STREAM_COLUMNS
from bottega.evaluation.report.stream_sections import THIRDS, StreamSection, csv_rows
from bottega.evaluation.report.visual_rag_figures import average_rows, efficiency
from bottega.evaluation.streams.stream_summary import TREND_COLUMNS

FORMULA, NUMBER = re.compile(r"[=+@\t\r-]"), re.compile(r"[+-]?[\d.,]+%?")
COLUMNS = (
    *("benchmark", "run", "model", "method", "shots", "items", "n", "failed", "missing", "invalid"),
    *("metric", "value", "low", "high"),
    *("calls", "prompt_tokens", "completion_tokens", "cost_usd", "seconds_an_answer"),
)


ITEM_COLUMNS = (
    *("run", "method", "shots", "item", "files", "question", "truth"),
    *("answer", "valid", "score", "tier"),
    *("calls", "prompt_tokens", "completion_tokens", "cost_usd", "seconds", "reply", "trace"),
    "error",
)


def items_as_csv(runs: Mapping[str, StoredRun]) -> str:
    """Return a line for each method and each item that it answered or failed."""
    lines = (line for name, run in runs.items() for line in _items(name, run))
    return _csv(ITEM_COLUMNS, (list(map(_without_formula, line)) for line in lines))


def _without_formula(cell: object) -> object:
    """Return a cell that spreadsheet programs do not execute: texts of data and models may."""
    is_formula = isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


def _items(name: str, run: StoredRun) -> Iterator[tuple[object, ...]]:
    for key, (index, item) in product(run.methods, enumerate(run.items)):
        names = (name, *key, index, item.files, item.example.query.text, item.example.answer)
        if (found := run.answers.get(key, {}).get(index)) is not None:
            one = found.scored
            judged = (one.answer.text, one.answer.valid, one.score, one.tier)
            costs = (one.calls, one.prompt_tokens, one.completion_tokens, one.cost_usd)
            reply = next(iter(found.replies), "")
            yield (*names, *judged, *costs, found.seconds, reply, found.trace, "")
        elif (error := run.failures.get(key, {}).get(index)) is not None:
            yield (*names, *[""] * (len(ITEM_COLUMNS) - len(names) - 1), error)


def as_csv(sections: Sequence[Section]) -> str:
    """Return a line for each metric of each row, the main metric first."""
    lines = (_lines(section, row) for section in sections for row in section.rows)
    return _csv(COLUMNS, chain.from_iterable(lines))


def as_markdown(sections: Sequence[Section], *, title: str, made: str) -> str:
    parts = [f"# {title}", f"{made}. 95 % intervals in brackets. {EXCLUSION_RULE}"]
    if rows := average_rows(sections):
        head = ("method", *(section.benchmark for section in sections if section.rows), "average")
        cells = [(row.method, *map(_share, row.best), _share(row.average)) for row in rows]
        parts += ["## Across benchmarks", "Best number of shots.", _table(head, cells)]
    for section in sections:
        parts += [
            f"## {_escaped(section.benchmark)}",
            plural(section.item_count, "item", ",") + ".",
        ]
        parts += [f"Demonstrations: {_escaped(text)}." for text in demonstration_texts(section)]
        parts.append(_table(*_figures(section)))
        if needed := efficiency(section):
            head = ("method", "baseline", "shots", "baseline shots", "ratio", "gain")
            needed_rows = [
                (
                    *(one.method, one.many_shot, one.shots, one.many_shots),
                    *(_figure(bounds(estimate)) for estimate in (one.ratio, one.gain)),
                )
                for one in needed
            ]
            parts += ["Demonstrations needed for the best many-shot result:"]
            parts.append(_table(head, needed_rows))
        if section.pairs:
            head = ("method", "baseline", "shots", "n", "difference", "p")
            pairs = [
                (
                    one.method,
                    one.against,
                    one.shots,
                    one.n,
                    f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]",
                    "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}",
                )
                for one in section.pairs
            ]
            parts += ["Paired differences on the same items:", _table(head, pairs)]
        if published := references(section.benchmark, section.metrics):
            published_rows = [
                (
                    one.paper,
                    one.table,
                    one.method,
                    "best or unstated" if one.shots is None else one.shots,
                    one.model,
                    f"{one.value:.2f} %",
                )
                for one in published
            ]
            head = ("paper", "table", "method", "shots", "model", "value")
            parts += ["Published results of other models:", _table(head, published_rows)]
    return "\n\n".join(parts) + "\n"


def streams_as_csv(sections: Sequence[StreamSection]) -> str:
    """Return a line for each curve and rate."""
    return _csv(STREAM_COLUMNS, chain.from_iterable(map(csv_rows, sections)))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    return buffer.getvalue()


def streams_as_markdown(section: StreamSection) -> str:
    head = ("curve", "master", "streams", "n", section.metric, "gain", *THIRDS, "growth", "USD")
    rows = [
        (
            *(point.curve, f"{point.rate:g}", point.streams, point.n),
            *(_figure(bounds(one)) for one in (point.accuracy, point.gain, *point.gains)),
            _figure(bounds(point.growth)),
            "unknown" if point.cost_usd is None else f"{point.cost_usd:.4f}",
        )
        for point in section.points
    ]
    items = f"{plural(len(section.run.items), 'item', ',')}, orders: {section.config.orders}."
    title = f"## {_escaped(section.config.benchmark)}: streams"
    parts = [title, items, _table(head, rows)]
    if section.trends:
        tests = [trend.row for trend in section.trends]
        parts += ["Page's trend test:", _table(TREND_COLUMNS, tests)]
    return "\n\n".join(parts) + "\n"


def _lines(section: Section, row: ReportRow) -> Iterator[tuple[object, ...]]:
    r = row.result
    names = (section.benchmark, row.run, row.model, r.method, r.shots)
    counts = (section.item_count, r.n, r.failed, r.missing, r.invalid)
    costs = (r.calls, r.prompt_tokens, r.completion_tokens, r.cost_usd, row.per_item(r.seconds))
    yield (*names, *counts, r.metric, r.value, r.low, r.high, *costs)
    for one in r.also:
        yield (*names, *counts, one.metric, one.value, one.low, one.high, *costs)


def _figures(section: Section) -> tuple[list[str], list[tuple[object, ...]]]:
    named = len(section.runs) > 1
    head = [
        *(("run",) if named else ()),
        "method",
        "shots",
        "n",
        section.metric,
        *section.other_metrics,
    ]
    head += ["invalid", "failed", "missing", "calls", "tokens", "USD", "seconds per answer"]
    rows: list[tuple[object, ...]] = []
    for row in section.rows:
        r = row.result
        also = {one.metric: (one.value, one.low, one.high) for one in r.also}
        figures = [(r.value, r.low, r.high), *(also.get(name) for name in section.other_metrics)]
        rows.append(
            (
                *((row.run,) if named else ()),
                r.method,
                r.shots,
                r.n,
                *map(_figure, figures),
                r.invalid,
                r.failed,
                r.missing,
                r.calls,
                row.tokens,
                "unknown" if r.cost_usd is None else f"{r.cost_usd:.4f}",
                "–" if (seconds := row.per_item(r.seconds)) is None else f"{seconds:.2f}",
            )
        )
    return head, rows


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _figure(values: tuple[float | None, float | None, float | None] | None) -> str:
    if values is None or values[0] is None:
        return "–"
    value, low, high = values
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_escaped(str(cell)) for cell in line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
