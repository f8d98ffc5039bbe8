"""Commands that change a knowledge base: add, rm, export, import, verify, reindex, pin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import LOCAL, check_executor, embedder_opener
from bottega.cli.example_source import ExampleSource, open_passages, open_source
from bottega.cli.knowledge_files import (
    note_embedder,
    open_to_add,
    open_to_repair,
    refit_metric,
    refit_metrics,
    to_reindex,
)
from bottega.cli.options import Embed, Json, KnowledgeFile, Namespace, On, WorkerCount
from bottega.cli.output import (
    SkippedExamples,
    note,
    noting_interruption,
    print_json,
    print_result,
    print_table,
    say,
    warn,
)
from bottega.cli.shown_progress import ProgressStatus, progress
from bottega.errors import LoadError, SettingError
from bottega.evaluation.knowledge_rows import (
    check_filled,
    counted,
    embedder_spec,
    open_rows,
    option_for,
    others,
    whole_name,
)
from bottega.evaluation.methods.leave_one_out import COMPARED, embedder_by_evidence
from bottega.evaluation.methods.retrieval import OpenEmbedder
from bottega.image import Image
from bottega.knowledge import AddResult, KnowledgeBase
from bottega.knowledge.batch import is_sound
from bottega.knowledge.embedders.names import BUNDLED, packaged_name, reads_text_only
from bottega.knowledge.loaders.folders import faint_images, similar_labels
from bottega.knowledge.records import DEFAULT
from bottega.knowledge.transfer import count_exported
from bottega.naming import SAMPLED, default_embedder, embedder_note
from bottega.recording import ABSTENTION
from bottega.types import Example

MAX_DOUBTFUL = 30  # examples in the table of verify --labels
ID_LENGTH = 12  # characters of an id in a table


def add(
    file: KnowledgeFile,
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help="Folder or .zip with one subfolder per class, folder with demo.csv (ManyICL), a "
            ".csv, .tsv, .jsonl or .parquet file, hf:DATASET, digits, or the examples of a "
            "published benchmark, e.g. mathvision:DIR.",
        ),
    ],
    split: Annotated[
        str | None, Option(metavar="NAME", help="Split of the source: train, test, demo, ...")
    ] = None,
    image_column: Annotated[str, Option(metavar="NAME", help="Column of images or paths.")] = "",
    label_column: Annotated[str, Option(metavar="NAME", help="Column of labels or answers.")] = "",
    passages: Annotated[
        bool,
        Option(
            "--passages",
            help="Add passages without answers: OK-VQA's Google Search corpus, "
            "WIT, or lines of JSON with text and an optional image.",
        ),
    ] = False,
    namespace: Namespace = "",
    embed: Embed = None,
    strict: Annotated[
        bool, Option("--strict", help="Stop at the first unreadable row or image.")
    ] = False,
    on: On = LOCAL,
    workers: WorkerCount = None,
    json: Json = False,
) -> None:
    """Add labelled images or passages to a knowledge base, which is created if missing. Unreadable
    ones are reported and skipped."""
    check_executor(on, workers)
    skipped = SkippedExamples(strict=strict)
    if passages:
        found = open_passages(source, split, skipped)
    else:
        columns = {"image_column": image_column, "label_column": label_column}
        found = open_source(source, split, skipped, **columns)
    first = _first_sound(found, source, skipped)
    images = list(chain.from_iterable(one.query.images for one in first))
    default = default_embedder(images)
    has_default = embed is None and bool(images) and not file.exists()
    _check_texts_differ(embed, first)
    status = ProgressStatus(found.total)
    with (
        noting_interruption(lambda: _kept(status, file)),
        embedder_opener(on, workers) as opener,
        open_to_add(file, embed, namespace, default, opener) as knowledge,
        progress("adding", status),
    ):
        added = knowledge.add(chain(first, found.examples), on_error=skipped, progress=status)
        default, reason = _embed_by_evidence(knowledge, opener, default, has_default)
        total, embedders = len(knowledge), _embedders(knowledge)
        _note_doubtful_labels(knowledge, file, first)
        refit_metric(knowledge)
    _warn_of_faint_images(images)
    skipped.warn_of_rest()
    if added.new == added.duplicates == 0:
        raise _nothing_readable(source, skipped)
    counts = {"new": added.new, "duplicates": added.duplicates, "examples": total}
    text = _added_text(added, skipped, whole_name(file, namespace), total, embedders)
    print_result(json, {**counts, "skipped": skipped.reasons}, text)
    if has_default:
        note(embedder_note(default, images, f"bottega reindex {file} --embed", reason))


def _warn_of_faint_images(images: Sequence[Image]) -> None:
    if (faint := faint_images(images)) is not None:
        warn(faint)


def _embed_by_evidence(
    knowledge: KnowledgeBase, opener: OpenEmbedder, default: str, is_new: bool
) -> tuple[str, str]:
    """Embed the images of a new file again if `bundled` embedded them, but an embedder of
    photographs is clearly more accurate on a sample. Return the name of the embedder and the reason
    for it, "" for the default."""
    if not is_new or default != BUNDLED:
        return default, ""
    sample = knowledge.get_many(knowledge.sample_ids(COMPARED))
    if (found := embedder_by_evidence(sample, opener)) is None:
        return default, ""
    with progress("embedding", len(knowledge)) as step:
        knowledge.reindex(DEFAULT, opener(found[0]), progress=step)
    note_embedder(knowledge, DEFAULT, found[0])
    return found


def _first_sound(found: ExampleSource, source: str, skipped: SkippedExamples) -> Sequence[Example]:
    """Read some readable examples before a file is created. Raises `LoadError` if none is."""
    first = list(islice((one for one in found.examples if is_sound(one, skipped)), SAMPLED))
    if not first:
        skipped.warn_of_rest()
        raise _nothing_readable(source, skipped)
    return first


def _nothing_readable(source: str, skipped: SkippedExamples) -> LoadError:
    if not skipped:
        return LoadError(f"{source} has no examples", hint="check the file, or choose a split")
    return LoadError(
        f"{source} has no readable examples, got {plural(len(skipped), 'error')}",
        hint=skipped[0].hint or str(skipped[0]),
    )


def _kept(status: ProgressStatus, file: StoreLocation) -> str:
    return f"{status.count('example')} are done; repeat the command to add the rest to {file}"


def _check_texts_differ(embed: str | None, examples: Sequence[Example]) -> None:
    """Raise `SettingError` for a text embedder if all labelled images have the same question: all
    vectors would be equal."""
    questions = {one.query.text for one in examples}
    labelled = all(one.query.images and one.answer for one in examples)
    if embed and reads_text_only(embed) and len(examples) > 1 and labelled and len(questions) == 1:
        raise SettingError(
            f"--embed {embed} reads the questions, which are all {questions.pop()!r}",
            hint="set --embed to bundled, photos or pixels, which read the images",
        )


def _note_doubtful_labels(
    knowledge: KnowledgeBase, file: StoreLocation, added: Sequence[Example]
) -> None:
    """Print notes on contradictory answers, similar labels, a single label, and a label that equals
    abstention."""
    if groups := knowledge.contradictions():
        examples = knowledge.get_many(groups[0])
        named = " and ".join(f"{one.answer!r} ({one.source}, {one.id})" for one in examples[:2])
        note(
            f"{plural(len(groups), 'question')} with several answers, for example {named}; remove a"
            f" wrong one with bottega rm {file} ID"
        )
    labels = knowledge.labels()
    one_question = len({one.query.text for one in added}) == 1
    if one_question and (similar := similar_labels(labels)) is not None:
        warn(similar)
    if len(labels) == 1 and not knowledge.ids_by_label().get(""):
        note(f"{file} has the label {labels[0]!r} only; add images of other classes")
    if ABSTENTION in map(str.casefold, labels):
        note(
            f"the label {ABSTENTION!r} is also the answer of bundled models to images unlike all"
            " examples; give the class another name to tell them apart"
        )


def _embedders(knowledge: KnowledgeBase) -> list[str]:
    """Return the --embed values of all views."""
    specs = (embedder_spec(knowledge, view) for view in knowledge.views().values())
    return list(dict.fromkeys(specs))


def _added_text(
    added: AddResult, skipped: SkippedExamples, file: str, total: int, embedders: Sequence[str]
) -> str:
    parts = [f"{added.new} added"]
    if count := added.duplicates:
        parts.append(f"{count} {'was' if count == 1 else 'were'} there already")
    if skipped:
        parts.append(f"{len(skipped)} skipped")
    used = f"embedder{'' if len(embedders) == 1 else 's'}: {', '.join(embedders)}"
    return f"{', '.join(parts)}; {file} holds {plural(total, 'example')} ({used})"


Ids = Annotated[list[str], Argument(metavar="ID", help="Ids, or their beginnings, as shown by ls.")]


def rm(
    file: KnowledgeFile,
    ids: Ids,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Remove examples from a knowledge base."""
    with open_rows(file, namespace) as knowledge:
        removed = knowledge.delete(ids)
        left = len(knowledge)
    text = f"{removed} removed; {whole_name(file, namespace)} holds {plural(left, 'example')}"
    print_result(json, {"removed": removed, "examples": left}, text)


def export(
    file: KnowledgeFile,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="New or empty folder.")],
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Export a namespace as examples.jsonl and a folder of images. Exits with 1 if examples are
    damaged; they are reported and skipped."""
    skipped = SkippedExamples()
    with (
        open_rows(file, namespace) as knowledge,
        progress("exporting", len(knowledge)) as status,
        noting_interruption(
            lambda: (
                f"{folder} is incomplete with {status.count('example')}; delete it and repeat"
                " the command"
            )
        ),
    ):
        count = knowledge.export_to(folder, on_error=skipped, progress=status)
        left = others(knowledge, namespace)
    skipped.warn_of_rest()
    text = f"{plural(count, 'example')} written to {folder}, {len(skipped)} skipped"
    print_result(json, {"examples": count, "skipped": skipped.reasons}, text)
    if left:
        note(f"not exported: {counted(left)}; name another folder and {option_for(left)}")
    if skipped:
        raise Exit(1)


def import_(
    file: KnowledgeFile,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder written by bottega export.")],
    namespace: Namespace = "",
    embed: Embed = None,
    json: Json = False,
) -> None:
    """Import a folder of bottega export, with pins and counters; embed its examples again."""
    skipped, status = SkippedExamples(), ProgressStatus(count_exported(folder))
    with (
        noting_interruption(lambda: _kept(status, file)),
        open_to_add(file, embed, namespace) as knowledge,
        progress("adding", status),
    ):
        added = knowledge.import_from(folder, on_error=skipped, progress=status)
        total, embedders = len(knowledge), _embedders(knowledge)
        refit_metric(knowledge)
    skipped.warn_of_rest()
    counts = {"new": added.new, "duplicates": added.duplicates, "examples": total}
    text = _added_text(added, skipped, whole_name(file, namespace), total, embedders)
    print_result(json, {**counts, "skipped": len(skipped)}, text)


def verify(
    file: KnowledgeFile,
    repair: Annotated[
        bool, Option("--repair", help="Rebuild vectors, log and index files.")
    ] = False,
    deep: Annotated[
        bool, Option("--deep", help="Embed every example again and compare the vectors.")
    ] = False,
    labels: Annotated[
        bool,
        Option(
            "--labels",
            help="List doubtful labels instead: those that lose a vote of the other examples, the"
            " most doubtful first (a sample of at most 2,000 examples).",
        ),
    ] = False,
    embed: Embed = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Check images, vectors and index files against the rows, or list doubtful labels.

    Exits with 1 if an image, a vector or an index file is wrong.
    """
    if labels and (repair or deep or embed):
        raise SettingError(
            "--labels changes and embeds nothing", hint="remove --repair, --deep and --embed"
        )
    if labels:
        _list_doubtful_labels(file, namespace, json)
        return
    kept = f"{file} keeps the repairs made so far" if repair else f"{file} is unchanged"
    with (
        noting_interruption(lambda: f"{kept}; repeat the command to check all of it"),
        # The embedder is needed only to embed examples again.
        open_to_repair(file, embed) if deep or repair else open_rows(file) as knowledge,
    ):
        found = knowledge.verify(deep=deep, repair=repair, stages=progress)
    if json:
        print_json({"sound": found.sound, **vars(found)})
    else:
        for problem in found.problems:
            say(f"{'repaired' if problem.repaired else 'WRONG'}: {problem.what}")
        say(
            f"{plural(found.examples, 'example')}, {plural(found.images, 'image')},"
            f" {plural(found.vectors, 'vector')}, {plural(found.snapshots, 'index file')}:"
            f" {'sound' if found.sound else 'not sound'}"
        )
    if not found.sound:
        if not repair:
            options = f"{'--deep ' * deep}--repair{f' --embed {embed}' if embed else ''}"
            note(f"bottega verify {file} {options} rebuilds vectors, log and index files")
        raise Exit(1)


def _list_doubtful_labels(file: StoreLocation, namespace: str, json: bool) -> None:
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        found = knowledge.label_supports()
        listed = found if json else found[:MAX_DOUBTFUL]
        shown = knowledge.get_many([one.id for one in listed])
    if json:
        named = zip(found, shown, strict=True)
        print_json([{**vars(one), "source": old.source} for one, old in named])
        return
    rows = [
        (one.id[:ID_LENGTH], old.source, ", ".join(one.labels), one.support, ", ".join(one.likely))
        for one, old in zip(found, shown, strict=False)
    ]
    say(
        f"{plural(len(found), 'example')} whose label has a smaller share of the vote than another"
        + (f"; the first {MAX_DOUBTFUL}" if len(found) > MAX_DOUBTFUL else "")
    )
    if rows:
        print_table(("id", "source", "label", "support", "likely"), rows)
        options = f" {option_for({namespace: len(rows)})}" if namespace else ""
        note(
            f"look at one with bottega show {file} ID{options}; if its label is wrong, run bottega"
            f" rm {file} ID{options} and add the image again with the right label"
        )


def reindex(
    file: KnowledgeFile,
    embed: Embed = None,
    by: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="View to embed again, or a new one (default: the only one, or 'default').",
        ),
    ] = None,
    on: On = LOCAL,
    workers: WorkerCount = None,
    json: Json = False,
) -> None:
    """Embed all examples of every namespace with another embedder.

    After an interruption, the same command resumes.
    """
    check_executor(on, workers)
    with open_rows(file) as knowledge, embedder_opener(on, workers) as opener:
        name, spec = to_reindex(knowledge, embed, by, file)
        if name == DEFAULT:
            _check_texts_differ(spec, knowledge.get_many(knowledge.ids()[:SAMPLED]))
        embedder = opener(spec)
        with (
            progress("embedding", sum(knowledge.namespaces().values())) as status,
            noting_interruption(
                lambda: (
                    f"{file} keeps new vectors of {status.count('example')}; repeat the command"
                    " to resume"
                )
            ),
        ):
            count = knowledge.reindex(name, embedder, progress=status)
        note_embedder(knowledge, name, spec)
        namespaces = list(knowledge.namespaces())
    refit_metrics(file, namespaces)
    shown = packaged_name(embedder.fingerprint) or spec
    text = f"{plural(count, 'example')} embedded by {shown} as {name}"
    print_result(json, {"view": name, "embedded": count, "embedder": shown}, text)


def pin(file: KnowledgeFile, ids: Ids, namespace: Namespace = "", json: Json = False) -> None:
    """Protect examples from eviction."""
    with open_rows(file, namespace) as knowledge:
        _report_pins(knowledge.pin(ids), knowledge.stats().pinned, json)


def unpin(file: KnowledgeFile, ids: Ids, namespace: Namespace = "", json: Json = False) -> None:
    """Allow the eviction of pinned examples again."""
    with open_rows(file, namespace) as knowledge:
        _report_pins(knowledge.unpin(ids), knowledge.stats().pinned, json)


def _report_pins(changed: int, count: int, json: bool) -> None:
    text = f"{changed} changed; {count} pinned"
    print_result(json, {"changed": changed, "pinned": count}, text)
