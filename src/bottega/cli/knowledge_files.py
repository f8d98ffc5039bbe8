"""Functions that open knowledge bases with their views and namespaces."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bottega._util.locations import StoreLocation
from bottega.cli.components import open_embedder
from bottega.errors import EmbedderMismatchError, StoreError
from bottega.evaluation.knowledge_rows import check_filled, chosen, embedder_spec, open_rows
from bottega.evaluation.methods.retrieval import OpenEmbedder
from bottega.image import path_text
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.embedders.names import (
    BUNDLED,
    NOTE,
    earlier_photos,
    note_of,
    packaged_name,
    photo_tower,
)
from bottega.knowledge.metric import SearchMetric
from bottega.knowledge.records import DEFAULT, StoredView, check_name
from bottega.naming import SAMPLED

VECTORS = "BOTTEGA_VECTORS"  # URL of a Milvus server, which may contain a password


def open_to_search(
    file: StoreLocation,
    embed: str | None,
    namespace: str,
    by: str | None,
    metric: SearchMetric = "stored",
) -> KnowledgeBase:
    """Open a knowledge base with the view to search. `embed` defaults to the view's embedder."""
    with open_rows(file, namespace) as rows:
        check_filled(rows, file, namespace)
        view = chosen(rows.views(), by, file)
        spec = embed or embedder_spec(rows, view)
    _name_in_warnings(file)
    with _mismatch_hint(file, embed):
        views = _opened({view.name: spec})
        vectors = os.environ.get(VECTORS) if file.file is None else None
        return KnowledgeBase.open(
            file.target, views, metric=metric, namespace=namespace, vectors=vectors
        )


def open_to_add(
    file: StoreLocation,
    embed: str | None,
    namespace: str,
    default: str = BUNDLED,
    opener: OpenEmbedder = open_embedder,
) -> KnowledgeBase:
    """Open or create a knowledge base with all of its views. `default` is the embedder of a new
    one. `opener` opens embedders."""
    if file.exists():
        with KnowledgeBase.open(file.target, embed=None) as rows:
            stored = rows.views()
            if foreign := [name for name, view in stored.items() if not _is_own(rows, view)]:
                hint = f"add from Python: KnowledgeBase.open(path, {{{foreign[0]!r}: View(...)}})"
                raise _python_view_error(file, foreign, hint=hint)
            specs = _makers(rows, stored, embed, file, default)
            check_same_content(rows, views := _opened(specs, opener), file)
    else:
        views = _opened(specs := {DEFAULT: embed or default}, opener)
        _make_folder(file)
    with _mismatch_hint(file, embed):
        knowledge = KnowledgeBase.open(file.target, views, namespace=namespace)
    # A new file has no stored views yet, so `note_embedder` does not apply.
    if DEFAULT in specs and knowledge.note(NOTE) != specs[DEFAULT]:
        knowledge.set_note(NOTE, specs[DEFAULT])
    return knowledge


def open_to_repair(file: StoreLocation, embed: str | None) -> KnowledgeBase:
    """Open a file with the views that can be embedded again; verification reports the others."""
    with open_rows(file) as rows:
        stored = rows.views()
        own = {name: view for name, view in stored.items() if _is_own(rows, view)}
        if stored and not own and embed is not None:
            hint = "remove --embed, or repair from Python"
            raise _python_view_error(file, list(stored), hint=hint)
        views = _opened(_makers(rows, own, embed, file) if own or not stored else {})
        if embed is not None:
            check_same_content(rows, views, file)
        for name in views_of_other_content(rows, views):
            del views[name]
    with _mismatch_hint(file, embed):
        return KnowledgeBase.open(file.target, views or None, create=False)


def _make_folder(location: StoreLocation) -> None:
    if location.file is None:
        return
    try:
        location.file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the folder {path_text(location.file.parent)} cannot be created: {error.strerror}",
            hint="check the path and its permissions",
        ) from error


def _name_in_warnings(file: StoreLocation) -> None:
    """Show the knowledge base instead of the placeholder in warnings of the bundled model."""
    show = warnings.showwarning

    def named(message: Warning | str, *details: Any, **options: Any) -> None:
        show(str(message).replace("K.db", str(file)), *details, **options)

    warnings.showwarning = named


@contextmanager
def _mismatch_hint(file: StoreLocation, embed: str | None) -> Iterator[None]:
    try:
        yield
    except EmbedderMismatchError as error:
        hint = f"bottega reindex {file} embeds all examples again"
        if (successor := earlier_photos(error.stored)) is not None:
            hint = f"bottega reindex {file} --embed {successor} embeds all examples again"
        elif embed is not None:
            with open_rows(file) as rows:
                made = [one for one in rows.views().values() if one.fingerprint == error.stored]
                try:
                    (spec,) = {embedder_spec(rows, view) for view in made}
                except (StoreError, ValueError):
                    raise error from None
            reindex = f"bottega reindex {file} --embed {embed} embeds all examples again"
            hint = f"set --embed {spec}, or leave it out; {reindex}"
        names = [packaged_name(one) or one for one in (error.stored, error.given)]
        raise EmbedderMismatchError(*names, hint=hint) from error


def _opened(specs: Mapping[str, str], opener: OpenEmbedder = open_embedder) -> dict[str, View]:
    return {name: View(opener(spec)) for name, spec in specs.items()}


def _makers(
    knowledge: KnowledgeBase,
    stored: Mapping[str, StoredView],
    embed: str | None,
    file: StoreLocation,
    default: str = BUNDLED,
) -> dict[str, str]:
    """Return the embedder of each view; without views, `default` for the view of that name."""
    if not stored:
        return {DEFAULT: embed or knowledge.note(NOTE) or default}
    specs = {}
    if embed is not None:
        specs[chosen(stored, None, file).name] = embed
    return {
        name: specs.get(name) or embedder_spec(knowledge, view) for name, view in stored.items()
    }


def check_same_content(
    knowledge: KnowledgeBase, views: Mapping[str, View], file: StoreLocation
) -> None:
    if foreign := views_of_other_content(knowledge, views):
        hint = "open the file in Python: KnowledgeBase.open(path, {name: View(...)})"
        raise _python_view_error(file, foreign, hint=hint)


def views_of_other_content(knowledge: KnowledgeBase, views: Mapping[str, View]) -> list[str]:
    """Return the views whose content only Python code defines, possibly `default` too."""
    stored = knowledge.views()
    return [
        name
        for name, view in views.items()
        if name in stored
        and stored[name].fingerprint == view.embed.fingerprint  # else opening fails
        and not knowledge.is_made_by(name, view)
    ]


def to_reindex(
    knowledge: KnowledgeBase, embed: str | None, by: str | None, file: StoreLocation
) -> tuple[str, str]:
    """Return the view's name and embedder; a new view uses the embedder of `default`."""
    stored = knowledge.views()
    name = by if by is not None else (chosen(stored, None, file).name if stored else DEFAULT)
    check_name(name)  # before an embedder is loaded
    if name not in stored:
        return name, embed or knowledge.note(NOTE) or BUNDLED
    if not _is_own(knowledge, stored[name]):
        hint = f"knowledge.reindex({name!r}, View(...)) in Python, or --by with a new name"
        raise _python_view_error(file, [name], hint=hint)
    return name, embed or embedder_spec(knowledge, stored[name])


def _is_own(knowledge: KnowledgeBase, view: StoredView) -> bool:
    return view.name == DEFAULT or knowledge.note(note_of(view)) is not None


def _python_view_error(file: StoreLocation, names: Sequence[str], *, hint: str) -> StoreError:
    return StoreError(
        f"these views of {file} are defined by Python code: {', '.join(names)}", hint=hint
    )


def note_embedder(knowledge: KnowledgeBase, name: str, spec: str) -> None:
    """Note the view's embedder in the file, for later commands."""
    note = note_of(knowledge.views()[name])
    if knowledge.note(note) != spec:
        knowledge.set_note(note, spec)


def refit_metric(knowledge: KnowledgeBase) -> None:
    """Fit the metric of labelled photographs that all ask one question, or fit it again if it is
    outdated (`KnowledgeBase.refit_metric`). A chosen plain cosine stays."""
    fingerprints = [view.fingerprint for view in knowledge.views().values()]
    name = packaged_name(fingerprints[0]) if fingerprints else None
    if name is None or photo_tower(name) is None or knowledge.is_multi_label():
        return
    sample = knowledge.get_many(knowledge.sample_ids(SAMPLED))
    if len({one.query.text for one in sample}) == 1:
        knowledge.refit_metric()


def refit_metrics(file: StoreLocation, namespaces: Iterable[str]) -> None:
    """Fit the metrics of these namespaces after their images were embedded again."""
    for namespace in namespaces:
        with open_rows(file, namespace) as knowledge:
            refit_metric(knowledge)
