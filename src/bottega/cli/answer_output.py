"""Output of `bottega classify` and `ask`: answers as JSON, and a table of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega._util.progress import plural
from bottega.cli.output import note, print_json, print_table, warn
from bottega.errors import BottegaError
from bottega.evaluation.methods.logistic import VectorAnswer
from bottega.knowledge.fitted_search import CLASS_MEAN
from bottega.recording import ABSTENTION, is_abstention
from bottega.types import Answer, Candidate, Trace


@dataclass
class ImageResult:
    """Image given on the command line with its trace, its vector answer or its error."""

    path: Path
    trace: Trace | VectorAnswer | None = None
    error: BottegaError | None = None

    @property
    def is_done(self) -> bool:
        return self.trace is not None or self.error is not None

    @property
    def outcome(self) -> dict[str, object]:
        if isinstance(self.trace, VectorAnswer):
            return _vector_answer(self.trace)
        if self.trace:
            return answer_document(self.trace)
        return {"error": str(self.error), "hint": self.error.hint if self.error else ""}


def kept_text(results: Sequence[ImageResult]) -> str:
    """Return the note on an interruption."""
    done = sum(one.is_done for one in results)
    return (
        f"{done} of {plural(len(results), 'image')} are classified, as printed; repeat the command"
        " with the others"
    )


def _vector_answer(found: VectorAnswer) -> dict[str, object]:
    """Return the keys of `answer_document`, for a method that calls no model."""
    return {
        **_label(found.answer),
        "reply": None,
        "model": None,
        "demonstrations": _shown(found.candidates),
        "calls": 0,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "cost_usd": 0.0,
        "seconds": round(found.seconds, 4),
        "trace": None,
        "method": found.method,
    }


def _label(answer: Answer) -> dict[str, object]:
    return {
        "answer": answer.text if answer.valid else None,
        "labels": list(answer.labels),
        "valid": answer.valid,
        "confidence": answer.confidence,
    }


def _shown(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """Return the demonstrations; `text` is the passage, or the question of an example."""
    return [
        {
            "id": c.example.id,
            "text": c.example.query.text,
            "answer": c.example.answer,
            "score": c.score,
            **({"class_mean": True} if c.example.source == CLASS_MEAN else {}),
        }
        for c in candidates
    ]


def answer_document(trace: Trace) -> dict[str, object]:
    """Return the answer of a trace as JSON."""
    usage = trace.usage
    return {
        **_label(trace.answer),
        "reply": trace.reply.completions[0].text,
        "model": trace.reply.model,
        "demonstrations": _shown(trace.candidates),
        "calls": trace.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost_usd": trace.cost_usd,
        "seconds": round(trace.seconds, 4),
        "trace": trace.id,
    }


def report_images(results: Sequence[ImageResult], json: bool) -> None:
    """Print the errors on stderr, then the results as JSON or as a table."""
    for one in results:
        if one.error:
            warn(one.error, about=str(one.path))
    if json:
        print_json([{"image": str(one.path), **one.outcome} for one in results])
        return
    rows = [_row(one.path, one.trace) for one in results if one.trace]
    if rows:
        by_model = isinstance(next(one.trace for one in results if one.trace), Trace)
        shown = "agreeing demonstrations" if by_model else "agreeing neighbours"
        print_table(("image", "label", "confidence", shown), rows)
    if any(one.trace and _abstains(one.trace) for one in results):
        note(
            f"{ABSTENTION}: no example resembles the image enough for the model to choose a label;"
            " --method knn and --method logreg always choose a label"
        )


def _row(path: Path, trace: Trace | VectorAnswer) -> tuple[str, str, float | None, str]:
    answer = trace.answer
    reply = trace.reply.completions[0].text if isinstance(trace, Trace) else answer.text
    label = answer.text if answer.valid else f"(invalid) {reply[:60]!r}"
    if _abstains(trace):
        label = ABSTENTION
    examples = [c.example for c in trace.candidates if c.example.source != CLASS_MEAN]
    agree = sum(one.answer == answer.text for one in examples)
    shown = " ".join(str(path).splitlines())  # one line per image
    count = f"{agree} of {len(examples)}" if examples else "-"
    return shown, label, answer.confidence, count


def _abstains(trace: Trace | VectorAnswer) -> bool:
    """Return whether the model declined to choose a label."""
    return (
        isinstance(trace, Trace)
        and not trace.answer.valid
        and is_abstention(trace.reply.completions[0].text)
    )
