"""Functions that open knowledge bases with their views and namespaces."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import OpenEmbedder, open_embedder
from bottega.errors import EmbedderMismatchError, EmptyKnowledgeBaseError, SettingError, StoreError
from bottega.evaluation.benchmarks.loading import KNOWLEDGE_BASE
from bottega.image import path_text
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.embedders.names import BUNDLED, NOTE, note_of, packaged_name
from bottega.knowledge.records import DEFAULT, StoredView, check_name
from bottega.knowledge.tuned_settings import tuned_settings

MAX_NAMED = 5
VECTORS = "BOTTEGA_VECTORS"  # URL of a Milvus server, which may contain a password


def whole_name(file: StoreLocation, namespace: str) -> str:
    return f"{file}, namespace {namespace!r}," if namespace else str(file)


def others(knowledge: KnowledgeBase, namespace: str) -> dict[str, int]:
    """Return the number of examples in each other namespace."""
    counts = knowledge.namespaces()
    return {name: count for name, count in counts.items() if name != namespace}


def counted(namespaces: Mapping[str, int]) -> str:
    """Return text such as `12 in 'team-a', 3 in 'team-b'`; a long list is truncated."""
    shown = [f"{count} in {name!r}" for name, count in namespaces.items()]
    more = len(shown) - MAX_NAMED
    return ", ".join(
        [*shown[:MAX_NAMED], *([f"and {plural(more, 'more namespace')}"] if more > 0 else [])]
    )


def option_for(namespaces: Mapping[str, int]) -> str:
    """Return the option that selects one of the namespaces, in shell syntax."""
    return f"--namespace {shlex.quote(next(iter(namespaces))) if len(namespaces) == 1 else 'NAME'}"


def none_here(namespace: str, elsewhere: Mapping[str, int]) -> str:
    return f"no examples in namespace {namespace!r}; there are {counted(elsewhere)}"


def check_filled(knowledge: KnowledgeBase, file: StoreLocation, namespace: str) -> None:
    """Raise `EmptyKnowledgeBaseError` with the namespaces that hold examples."""
    if len(knowledge):
        return
    if elsewhere := others(knowledge, namespace):
        raise EmptyKnowledgeBaseError(
            none_here(namespace, elsewhere), hint=f"add {option_for(elsewhere)}"
        )
    raise EmptyKnowledgeBaseError(f"{file} is empty", hint=f"run bottega add {file} FOLDER")


def open_rows(file: StoreLocation, namespace: str = "") -> KnowledgeBase:
    """Open a knowledge base for reading and deleting rows, without an embedder."""
    if not file.exists():
        hint = f"run bottega add {file} FOLDER"
        raise StoreError(f"knowledge base {file} does not exist", hint=hint)
    return KnowledgeBase.open(file.target, embed=None, create=False, namespace=namespace)


def open_to_search(
    file: StoreLocation, embed: str | None, namespace: str, by: str | None
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
        return KnowledgeBase.open(file.target, views, namespace=namespace, vectors=vectors)


def _name_in_warnings(file: StoreLocation) -> None:
    """Show the knowledge base instead of the placeholder in warnings of the bundled model."""
    show = warnings.showwarning

    def named(message: Warning | str, *details: Any, **options: Any) -> None:
        show(str(message).replace("K.db", str(file)), *details, **options)

    warnings.showwarning = named


def evaluation_defaults(spec: str) -> tuple[str | None, str | None, str | None]:
    """Return the embedder, shots and order stored in the knowledge base of `knowledge-base:FILE`,
    each None if not stored. All are None for other benchmarks."""
    kind, _, location = spec.partition(":")
    if kind != KNOWLEDGE_BASE or not location:
        return None, None, None
    file = StoreLocation.from_argument(location)
    with open_rows(file) as rows:
        check_filled(rows, file, "")
        view = chosen(rows.views(), None, file)
        tuned = tuned_settings(rows)
        if tuned is None or tuned.embedder != view.fingerprint:
            return embedder_spec(rows, view), None, None
        return embedder_spec(rows, view), str(tuned.shots), tuned.order


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


@contextmanager
def _mismatch_hint(file: StoreLocation, embed: str | None) -> Iterator[None]:
    try:
        yield
    except EmbedderMismatchError as error:
        hint = f"bottega reindex {file} embeds all examples again"
        if embed is not None:
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


def chosen(stored: Mapping[str, StoredView], by: str | None, file: StoreLocation) -> StoredView:
    """Return the view `by`, else the only view, else `default`."""
    if not stored:
        raise StoreError(
            f"the examples of {file} have no vectors", hint=f"run bottega verify {file} --repair"
        )
    names = ", ".join(stored)
    if by is None and len(stored) > 1 and DEFAULT not in stored:
        raise SettingError(f"{file} has several views: {names}", hint="choose one with --by")
    if by is not None and by not in stored:
        raise SettingError(f"{file} has no view {by!r}", hint=f"set --by to one of {names}")
    return stored[by or (DEFAULT if DEFAULT in stored else next(iter(stored)))]


def embedder_spec(knowledge: KnowledgeBase, view: StoredView) -> str:
    """Return the --embed value of a view, by its fingerprint or by a note in the file."""
    if (name := packaged_name(view.fingerprint)) is not None:
        return name
    if (noted := knowledge.note(note_of(view))) is not None:
        return noted
    raise StoreError(
        f"the embedder {view.fingerprint!r} of the view {view.name!r} is unknown",
        hint="set --embed if sentence-transformers can load it, or use Python",
    )


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
