"""Read-only commands: `ls`, `show`, `stats`, `log` and `models`."""

from __future__ import annotations

import mimetypes
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bottega._util.event_loops import run_closing
from bottega._util.progress import plural
from bottega.bundled import bundled_folder
from bottega.bundled.efficientnet import EXTRA
from bottega.bundled.photo_model import NETWORKS
from bottega.cli.components import stored_traces, traces_option
from bottega.cli.options import Json, KnowledgeFile, Namespace, RecordedTraces, since_option
from bottega.cli.output import clock, note, print_json, print_table, say
from bottega.errors import NotFoundError, SettingError
from bottega.evaluation.knowledge_rows import none_here, open_rows, option_for, others
from bottega.evaluation.metrics.metric import accuracy
from bottega.generation import OpenAIGenerator
from bottega.knowledge import And, Contains, Eq, Filter, Range
from bottega.knowledge.embedders.names import note_of, packaged_name
from bottega.knowledge.stored_metric import StoredMetric
from bottega.knowledge.tuned_settings import tuned_settings
from bottega.naming import DISPATCHED, SIMULATED
from bottega.recording import StoredTrace
from bottega.types import Example

Limit = Annotated[
    int, Option("--limit", "-n", min=1, max=1_000_000, help="Maximum number of rows.")
]

Since = Annotated[float | None, since_option("rows")]
MAX_LABELS = 10
MIN_ID = 12  # characters of an id in a table; those of a gateway begin with req_ and their time
MAX_TEXT = 48  # characters in a table
DRAWINGS, PHOTOGRAPHS = "drawings", "photographs"
# The kind of images that a bundled model answers about, and its description.
KINDS = {
    "apprentice": (DRAWINGS, "learns digits, drawings and synthetic scenes from demonstrations"),
    "master": (DRAWINGS, "knows digits and synthetic scenes"),
    "photos": (PHOTOGRAPHS, "learns photographs from demonstrations"),
    "photos-lite2": (PHOTOGRAPHS, "the same, with a larger network"),
    "photos-master": (PHOTOGRAPHS, "knows ImageNet's 1,000 classes"),
}
VIEW_FIELDS = ("views", "embedder", "dimension")


def ls(
    file: KnowledgeFile,
    label: Annotated[
        str | None, Option(metavar="NAME", help="Only examples with this label.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Only examples with this tag; may be repeated."),
    ] = None,
    text: Annotated[
        str | None, Option(help="Only examples whose question or answer contains this.")
    ] = None,
    since: Since = None,
    limit: Limit = 20,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """List the examples of a knowledge base."""
    with open_rows(file, namespace) as knowledge:
        found = knowledge.ids(label=label, where=_filter(tag or (), text, since))
        examples = knowledge.get_many(found[:limit])
        total, labels = len(knowledge), knowledge.labels()
        elsewhere = {} if total else others(knowledge, namespace)
    if elsewhere:
        note(f"{none_here(namespace, elsewhere)}; add {option_for(elsewhere)}")
        if not json:
            return
    elif label is not None and label not in labels:
        raise NotFoundError(
            f"no example has the label {label!r}", hint=f"labels here: {', '.join(labels[:20])}"
        )
    if json:
        print_json([_to_dict(example) for example in examples])
        return
    rows = [
        # A passage has a text and no answer.
        (e.id, e.answer or _shortened(e.query.text), _image_sizes(e), e.source or "-")
        for e in examples
    ]
    print_table(("id", "answer", "image", "source"), rows)
    say(f"{len(examples)} of {plural(total, 'example')}")


def _filter(tags: Sequence[str], text: str | None, since: float | None) -> Filter:
    parts: list[Filter] = []
    for tag in tags:
        name, sign, value = tag.partition("=")
        if not (name and sign):
            hint = "set e.g. --tag ward=3"
            raise SettingError(f"--tag must be NAME=VALUE, got {tag!r}", hint=hint)
        parts.append(Eq(f"tags.{name}", value))
    if text is not None:
        parts.append(Contains(text))
    if since is not None:
        parts.append(Range("created", low=since))
    return And(tuple(parts))


def show(
    file: KnowledgeFile,
    id: Annotated[str, Argument(metavar="ID", help="Id, or its beginning.")],
    image: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the example's first image to this file, in its stored format.",
        ),
    ] = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Show one example with all its fields."""
    with open_rows(file, namespace) as knowledge:
        example, metadata = knowledge.get(id), knowledge.metadata(id)
    if image is not None:
        _write_image(example, image)
        note(f"wrote {image}")
    fields = _to_dict(example)
    if json:
        print_json(fields | {"pinned": metadata.pinned, "uses": metadata.uses})
    else:
        rows: list[tuple[str, object]] = []
        for name, value in fields.items():
            if value:
                text = ", ".join(map(str, value)) if isinstance(value, list) else value
                rows.append((name, text))
        rows += [("pinned", "yes" if metadata.pinned else "no"), ("uses", metadata.uses)]
        print_table(("field", "value"), rows)


def stats(file: KnowledgeFile, namespace: Namespace = "", json: Json = False) -> None:
    """Count examples, images and labels; list the views and other namespaces."""
    with open_rows(file, namespace) as knowledge:
        found, stored = vars(knowledge.stats()), knowledge.views()
        namespaces, elsewhere = knowledge.namespaces(), others(knowledge, namespace)
        tuned, metric = tuned_settings(knowledge), knowledge.stored_metric
        counts = {label: len(ids) for label, ids in knowledge.ids_by_label().items() if label}
        names = {
            view.name: packaged_name(view.fingerprint) or knowledge.note(note_of(view))
            for view in stored.values()
        }
    views = {
        name: {
            "embedder": names[name] or view.fingerprint,
            "fingerprint": view.fingerprint,
            "dimension": view.dimension,
        }
        for name, view in stored.items()
    }
    if json:
        first = next((view["embedder"] for view in views.values()), None)
        document = {**found, "label_counts": counts, "views": views, "namespaces": namespaces}
        print_json(
            {**document, "embedder": first, "tuned": tuned, "confidence": _confidences(metric)}
        )
        return
    totals = [(name, str(value)) for name, value in found.items() if name not in VIEW_FIELDS]
    if counts:
        position = [name for name, _ in totals].index("labels") + 1
        totals.insert(position, ("examples per label", _most_common(counts)))
    if tuned:
        settings = f"{plural(tuned.shots, 'shot')}, {tuned.order}, classify by {tuned.method}"
        totals.append(("tuned", settings))
    print_table(("field", "value"), totals)
    if confidences := _confidences(metric):
        say("\naccuracy of the vote by its confidence, in five folds, with 95 % intervals")
        print_table(tuple(confidences[0]), [tuple(one.values()) for one in confidences])
    if views:
        say("")
        rows = [
            (name, names[name] or "-", view.fingerprint, view.dimension)
            for name, view in stored.items()
        ]
        print_table(("view", "embedder", "fingerprint", "dimension"), rows)
    if elsewhere:
        say("")
        print_table(("other namespace", "examples"), list(elsewhere.items()))


def _confidences(metric: StoredMetric | None) -> list[dict[str, float]]:
    """Return number, share and accuracy of the votes with at least each confidence."""
    found = metric.calibration.by_confidence if metric else ()
    rows = []
    for least, n, right in found:
        if n:
            accurate = accuracy([index < right for index in range(n)])
            rows.append({"confidence": least, "n": n, "share": n / found[0][1], **vars(accurate)})
    return rows


def _most_common(counts: Mapping[str, int]) -> str:
    """Return text such as `cat 12, dog 9, and 3 more`, the largest first."""
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{label} {count}" for label, count in largest[:MAX_LABELS]]
    more = len(largest) - MAX_LABELS
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def log(
    id: Annotated[str | None, Argument(metavar="ID", help="Show this trace in full.")] = None,
    text: Annotated[
        str | None,
        Option(
            metavar="TEXT", help="Only requests whose question, answer or file name contains this."
        ),
    ] = None,
    tier: Annotated[
        str | None,
        Option(metavar="NAME", help="Only answers of this tier, such as master or rcts."),
    ] = None,
    namespace: Annotated[
        str | None, Option(metavar="NAME", help="Only requests of this namespace of a gateway.")
    ] = None,
    since: Since = None,
    limit: Limit = 20,
    traces: RecordedTraces = None,
    json: Json = False,
) -> None:
    """Show recent requests and their cost, newest first."""
    with closing(stored_traces(traces)) as store:
        if id is not None:
            trace = store.get(id)
            if json:
                print_json(trace)
            else:
                print_trace(trace)
                if trace.tree is not None:
                    note(f"show the search with bottega explain {trace.id}{traces_option(traces)}")
            return
        found = store.search(text or "", tier=tier, namespace=namespace, since=since, limit=limit)
        summary = store.summary()
        length = max(MIN_ID, store.unique_length([one.id for one in found]))
    if json:
        print_json({"summary": summary, "traces": found})
        return
    # Tiers of evaluations and gateways have names of their own.
    has_tiers = any(t.tier != t.model for t in found)
    names = Counter(Path(file).name for file in {file for one in found for file in one.files})
    rows = [
        (
            t.id[:length],
            clock(t.time),
            ", ".join(_file_name(file, names) for file in t.files) or ("-" if t.images else ""),
            _shortened(t.question),
            t.model,
            *([t.tier] if has_tiers else []),
            _shortened(t.answer.text if t.answer.valid else f"(invalid) {t.answer.text}"),
            len(t.demonstrations),
            t.usage.prompt_tokens,
            t.seconds,
            None if t.cost_usd is None else f"{t.cost_usd:.6f}",
        )
        for t in found
    ]
    tier_column = ["tier"] if has_tiers else []
    columns = ("id", "time", "file", "question", "model", *tier_column, "answer")
    print_table((*columns, "shots", "tokens", "seconds", "USD"), rows)
    note(f"{len(found)} of {summary.count} in {store.path}")


def _file_name(file: str, counts: Mapping[str, int]) -> str:
    """Return the name of a file, or its path if other files have the same name."""
    return file if counts[Path(file).name] > 1 else Path(file).name


def _shortened(text: str) -> str:
    """Return the text in one line, without its middle if it is long."""
    line = " ".join(text.split())
    half = MAX_TEXT // 2
    return line if len(line) <= MAX_TEXT else f"{line[:half]} ... {line[-half:]}"


def models(
    endpoint: Annotated[
        bool, Option("--endpoint", help="List the models at OPENAI_BASE_URL.")
    ] = False,
    json: Json = False,
) -> None:
    """List the models that --model accepts."""
    rows = [
        *_bundled_models(),
        (SIMULATED, "simulated", "answers the task codes by a fixed procedure"),
    ]
    if endpoint:
        generator = OpenAIGenerator("any")
        names = run_closing(generator.list_models(), generator)
        rows += [(f"openai:{name}", "endpoints", "at the endpoint") for name in names]
    else:
        where = (
            "at OPENAI_BASE_URL"
            if os.environ.get("OPENAI_BASE_URL")
            else "at any OpenAI-compatible endpoint (OPENAI_BASE_URL)"
        )
        rows.append(("openai:NAME", "endpoints", f"{where}; list them with --endpoint"))
        plain = "the same for base models without a chat template"
        rows.append(("openai-completions:NAME", "endpoints", plain))
    hub = "any image-text-to-text model of Hugging Face transformers"
    rows.append(("ID or FOLDER", "transformers", hub))
    if json:
        print_json([{"model": name, "kind": kind, "what": what} for name, kind, what in rows])
    else:
        print_table(("model", "kind", "description"), rows)


def _bundled_models() -> Iterator[tuple[str, str, str]]:
    """Yield name, kind and description, grouped by kind."""
    for name, (kind, description) in KINDS.items():
        folder = bundled_folder().parent / name
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        more = f" and the extra [{EXTRA}]" if name in NETWORKS else ""
        where = f"{size:.1f} MB, in this package{more}; see {folder / 'README.md'}"
        yield f"bundled:{name}", kind, f"{description}; {where}"
    for name, (for_photographs, for_others) in DISPATCHED.items():
        what = f"{for_photographs} for prompts with a photograph, {for_others} for others"
        yield name, "both", what


def _write_image(example: Example, file: Path) -> None:
    """Write the stored bytes; raise `SettingError` if the suffix contradicts their type."""
    if not example.query.images:
        raise NotFoundError(f"example {example.id} has no image", hint="remove --image")
    first = example.query.images[0]
    suffix = mimetypes.guess_extension(first.media_type, strict=False)
    named, _ = mimetypes.guess_type(file.name, strict=False)
    if suffix is not None and named not in (None, first.media_type):
        raise SettingError(
            f"the suffix of {file} does not match {first.media_type}",
            hint=f"set --image {file.with_suffix(suffix)}",
        )
    file.write_bytes(first.data)


def _to_dict(example: Example) -> dict[str, object]:
    return {
        "id": example.id,
        "question": example.query.text,
        "answer": example.answer,
        "labels": list(example.labels) if example.labels is not None else [example.answer],
        "choices": list(example.query.choices),
        "rationale": example.rationale,
        "tags": dict(example.tags),
        "source": example.source,
        "images": [image.sha256 for image in example.query.images],
        "sizes": _image_sizes(example),
    }


def _image_sizes(example: Example) -> str:
    return ", ".join(f"{image.width}x{image.height}" for image in example.query.images) or "-"


def print_trace(trace: StoredTrace) -> None:
    tier = "" if trace.tier == trace.model else f"  ({trace.tier})"
    say(f"{trace.id}  {clock(trace.time)}  {trace.model}{tier}")
    say(f"question: {trace.question}")
    for file in trace.files:
        say(f"file:     {file}")
    for sha256 in trace.images:
        say(f"image:    {sha256}")
    if trace.reason:
        say(f"route:    {trace.reason}")
    rows = [
        (d.order, d.answer or _shortened(d.text), d.score, d.id, d.source or "-")
        for d in trace.demonstrations
    ]
    if rows:
        answer = "answer" if any(d.answer for d in trace.demonstrations) else "passage"
        print_table(("position", answer, "score", "example", "source"), rows)
    if (one := trace.compression) is not None:
        store = f", store {one.store}" if one.store else ""
        say(f"prefix:   {plural(one.tokens, 'token')} by the compressor {one.compressor}{store}")
    for text, count in Counter(one.text for one in trace.completions).items():
        say(f"reply:    {f'({count} times) ' if count > 1 else ''}{text}")
    reasons = trace.answer.rationale
    if reasons and not any(reasons in one.text for one in trace.completions):
        say(f"reasons:  {reasons}")  # a gateway sends the answer without them
    confidence = trace.answer.confidence
    confidence_text = "" if confidence is None else f"  (confidence {confidence:.2f})"
    say(f"answer:   {trace.answer.text if trace.answer.valid else 'invalid'}{confidence_text}")
    cost = "unknown" if trace.cost_usd is None else f"{trace.cost_usd:.6f} USD"
    say(f"tokens:   {trace.usage.prompt_tokens} + {trace.usage.completion_tokens}   cost: {cost}")
    say(f"seconds:  {trace.seconds:.3f}")
