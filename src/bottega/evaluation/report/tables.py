"""The figures of a report for other programs (CSV) and for other documents (Markdown)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from bottega.evaluation.episodes import EXCLUSION_RULE
from bottega.evaluation.report.figures import Row, Section
from bottega.evaluation.report.references import references

COLUMNS = (
    *("benchmark", "run", "model", "method", "shots", "items", "n", "failed", "missing", "invalid"),
    *("metric", "value", "low", "high"),
    *("calls", "prompt_tokens", "completion_tokens", "cost_usd", "seconds_an_answer"),
)


def as_csv(sections: Sequence[Section]) -> str:
    """One line for each metric of each row, the first of which is what rows are compared by."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in sections:
        for row in section.rows:
            writer.writerows(_lines(section, row))
    return buffer.getvalue()


def as_markdown(sections: Sequence[Section], *, title: str, made: str) -> str:
    parts = [f"# {title}", f"{made}. 95 % intervals in brackets. {EXCLUSION_RULE}"]
    for section in sections:
        parts += [f"## {_escaped(section.benchmark)}", f"{section.asked:,} items."]
        parts.append(_table(*_figures(section)))
        if section.pairs:
            head = ("method", "less", "shots", "n", "difference", "p")
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
            parts += ["On the same items:", _table(head, pairs)]
        if published := references(section.benchmark, section.metrics):
            known = [
                (
                    one.paper,
                    one.table,
                    one.method,
                    "best or not stated" if one.shots is None else one.shots,
                    one.model,
                    f"{one.value:.2f} %",
                )
                for one in published
            ]
            head = ("paper", "table", "method", "shots", "model", "value")
            parts += ["Published figures, of other models:", _table(head, known)]
    return "\n\n".join(parts) + "\n"


def _lines(section: Section, row: Row) -> Iterator[tuple[object, ...]]:
    r = row.result
    names = (section.benchmark, row.run, row.model, r.method, r.shots)
    counts = (section.asked, r.n, r.failed, r.missing, r.invalid)
    costs = (r.calls, r.prompt_tokens, r.completion_tokens, r.cost_usd, row.each(r.seconds))
    yield (*names, *counts, r.metric, r.value, r.low, r.high, *costs)
    for one in r.also:
        yield (*names, *counts, one.metric, one.value, one.low, one.high, *costs)


def _figures(section: Section) -> tuple[list[str], list[tuple[object, ...]]]:
    named = len(section.runs) > 1
    head = [*(("run",) if named else ()), "method", "shots", "n", section.metric, *section.further]
    head += ["invalid", "failed", "not asked", "calls", "tokens", "USD", "seconds an answer"]
    rows: list[tuple[object, ...]] = []
    for row in section.rows:
        r = row.result
        also = {one.metric: (one.value, one.low, one.high) for one in r.also}
        figures = [(r.value, r.low, r.high), *(also.get(name) for name in section.further)]
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
                "–" if (seconds := row.each(r.seconds)) is None else f"{seconds:.2f}",
            )
        )
    return head, rows


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
