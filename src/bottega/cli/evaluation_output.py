"""Output of `bottega eval` and `demo`: plan, tables of results, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bottega import __version__
from bottega._util.progress import plural
from bottega.cli.output import note, print_table, say, to_json
from bottega.evaluation.benchmark import Benchmark, is_passage
from bottega.evaluation.method_comparison import MethodComparison
from bottega.evaluation.methods.prompts import (
    NONE,
    PROMPT,
    RATIONALES,
    Description,
    description_text,
)
from bottega.evaluation.methods.retrieval import EXCLUDE, EXCLUSION_RULE
from bottega.evaluation.methods.specifications import METHODS
from bottega.evaluation.outcomes import method_title
from bottega.evaluation.runs.paired import PairedDifference
from bottega.evaluation.runs.run_store import Failure
from bottega.evaluation.runs.runner import MethodResult
from bottega.recipes.cache_retrieval import BY_QUESTION, WITHOUT_TEXT

COLUMNS = ("method", "shots", "n", "value", "low", "high", "invalid", "failed", "calls", "seconds")
PAIRED_FIELDS = ("method", "against", "shots", "n", "value", "low", "high", "p_value")
PAIRED_COLUMNS = ("method", "baseline", "shots", "n", "difference", "low", "high", "p_value")
PAIRED_TESTS = (
    "right or wrong answers: Newcombe's interval, McNemar's exact p-value;\n"
    "other scores: bootstrap interval, p-value of a permutation test"
)
FOOTNOTE = 'Invalid replies count as wrong, also "unknown"; failed requests are excluded.'

CLASSIFICATIONS = ("image-folder:", "table:", "knowledge-base:")
RECOMMENDATION = ("visual-rag", "logreg")
SHOWN_FAILURES = 10


def print_plan(
    data: Benchmark, models: Sequence[str], calls: int, *, drafts: bool = False, orders: int = 1
) -> None:
    """Print the size of a run that `--dry-run` does not start."""
    say(
        f"{data.name}: {plural(len(data.items), 'item')}"
        f"{f' in {orders} orders' if orders > 1 else ''}, {_knowledge(data)},"
        f" {plural(len(data.labels), 'label') if data.labels else 'no labels'};"
        f" {' and '.join(dict.fromkeys(models))}; at most {plural(calls, 'call', ',')}"
        + (f" and {plural(len(data.items), 'draft', ',')}" if drafts else "")
    )


def _knowledge(data: Benchmark) -> str:
    """Return the numbers of labelled examples and passages."""
    passages = sum(map(is_passage, data.knowledge))
    counts = {"labelled example": len(data.knowledge) - passages, "passage": passages}
    some = [plural(count, name) for name, count in counts.items() if count]
    return " and ".join(some) or "no labelled examples"


def print_results(
    data: Benchmark, results: Sequence[MethodResult], differences: Sequence[PairedDifference]
) -> None:
    """Print the results, further metrics and paired differences of a run."""
    if not results:
        return
    if data.labels:
        kind = plural(len(data.labels), "label")
    elif any(item.query.choices for item in data.items):
        kind = "choices of each question"
    else:
        kind = "free answers"
    say(
        f"{data.name}: {_knowledge(data)}, {plural(len(data.items), 'evaluated item')}, "
        f"{kind}; {results[0].metric.replace('_', ' ')} with 95 % intervals"
    )
    say(EXCLUSION_RULE)
    if data.corrupted_count is not None:
        answers = plural(len(data.knowledge), "answer")
        say(f"label noise: {data.corrupted_count} of {answers} corrupted")
    print_table(COLUMNS, [[getattr(result, name) for name in COLUMNS] for result in results])
    also = [[r.method, r.shots, *vars(figure).values()] for r in results for figure in r.also]
    if also:
        say("\nfurther metrics, with 95 % intervals")
        print_table(("method", "shots", "metric", "value", "low", "high"), also)
    confident = [[r.method, r.shots, *vars(one).values()] for r in results for one in r.confident]
    if confident:
        say("\nscores of the answers with at least each confidence, with 95 % intervals")
        columns = ("method", "shots", "confidence", "n", "share", "value", "low", "high")
        print_table(columns, confident)
    if differences:
        say("\npaired differences on the same items, with 95 % intervals")
        rows = [[getattr(one, name) for name in PAIRED_FIELDS] for one in differences]
        for row in rows:
            row[-1] = row[-1] if row[-1] >= 0.001 else "< 0.001"
        print_table(PAIRED_COLUMNS, rows)
        say(PAIRED_TESTS)
    run = {result.method for result in results}
    notes = [spec.note for spec in METHODS.values() if spec.note and spec.name in run]
    note(" ".join([*notes, FOOTNOTE]))
    if data.name.startswith(CLASSIFICATIONS) and is_logistic_better(differences):
        note("logreg is more accurate here: bottega classify --method logreg")


def is_logistic_better(differences: Sequence[PairedDifference]) -> bool:
    """Return whether logreg is better than visual-rag at every number of shots, with intervals
    that exclude 0."""
    found = [one.high < 0 for one in differences if (one.method, one.against) == RECOMMENDATION]
    return bool(found) and all(found)


def report_comparison(comparison: MethodComparison, file: Path | None, out: Path | None) -> None:
    """Print the results of completed methods and the failed items of a stored run; write the
    results to `file` as JSON."""
    data, results, differences = comparison.data, comparison.results, comparison.differences
    shown = comparison.descriptions
    explained = [name for name, what in shown.items() if what[RATIONALES] != NONE]
    record = {**comparison.record, "explained": explained}
    if results:
        say(f"model {record['model']}; examples retrieved by {_retrieval(record)}")
        if any(len(what) > 1 for what in shown.values()):  # more than the rationales
            say(f"methods: {description_text(shown)}")
    print_results(data, results, differences)
    if file is not None and results:
        head = {
            **record,
            "shown": shown,
            "exclude": EXCLUDE,
            "knowledge_base": len(data.knowledge),
            "made_wrong": data.corrupted_count,
            "items": len(data.items),
            "labels": len(data.labels),
            "bottega": __version__,
        }
        file.write_bytes(to_json({**head, "results": results, "paired": differences}))
    _note_rationales(explained, results)
    _note_prompts(shown, results)
    _report_failures(comparison.failures, out)


def _retrieval(record: Mapping[str, object]) -> str:
    """Return the retrieval method with its embedders and its non-default settings."""
    name, image, text = record["retrieve"], record["embedder"], record.get("embed_text")
    embedders = [str(image)]
    if name in BY_QUESTION:
        embedders = [] if name in WITHOUT_TEXT else [str(text or image)]
    elif name not in WITHOUT_TEXT:
        embedders.append(str(text or "words"))
    more = [
        str(record[key]) if key == "metric" else f"{key.replace('_', ' ')} {record[key]}"
        for key in ("metric", "rerank", "groups", "kb_share")
        if key in record
    ]
    return ", ".join([f"{name} ({' and '.join(embedders)})" if embedders else str(name), *more])


def _note_rationales(with_rationales: Sequence[str], results: Sequence[MethodResult]) -> None:
    """Note that some methods show rationales and others do not."""
    shown = dict.fromkeys(result.method for result in results if result.shots)
    others = [name for name in shown if name not in with_rationales and METHODS[name].uses_model]
    explaining = [name for name in shown if name in with_rationales]
    if explaining and others:
        note(
            f"demonstrations of {', '.join(explaining)} include rationales, those of"
            f" {', '.join(others)} do not; for an equal comparison set --rationales or"
            " --no-rationales"
        )


def _note_prompts(shown: Mapping[str, Description], results: Sequence[MethodResult]) -> None:
    """Note that some methods ask for reasons and others do not."""
    ran = dict.fromkeys(result.method for result in results if METHODS[result.method].uses_model)
    reasoned = [name for name in ran if PROMPT in shown.get(name, {})]
    others = [name for name in ran if name not in reasoned]
    if reasoned and others:
        tokens = shown[reasoned[0]]["max_tokens"]
        note(
            f"the prompt of {', '.join(reasoned)} asks for reasons (up to {tokens} tokens), but"
            f" that of {', '.join(others)} does not; for an equal comparison, set --prompt reasoned"
        )


def stored_text(stored: int | None, out: Path | None) -> str:
    """Return what an interrupted run keeps, and how to resume it."""
    if stored is None:
        return "the answers of unfinished methods are lost; --out FOLDER stores each answer"
    return f"{plural(stored, 'answer')} in {out}; repeat the command to resume"


def _report_failures(failures: Sequence[Failure], out: Path | None) -> None:
    """Print the first failed items of a stored run."""
    for one in failures[:SHOWN_FAILURES]:
        say(f"failed: {method_title(one.method, one.shots)}, item {one.index}: {one.error}")
    if len(failures) > SHOWN_FAILURES:
        say(f"and {len(failures) - SHOWN_FAILURES} more; list all with bottega report {out}")
