"""Knowledge bases opened for their rows, and the embedders of their views."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.errors import EmptyKnowledgeBaseError, SettingError, StoreError
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.embedders.names import earlier_photos, note_of, packaged_name
from bottega.knowledge.records import DEFAULT, StoredView

MAX_NAMED = 5


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
    if (earlier := earlier_photos(view.fingerprint)) is not None:
        return earlier  # opening the file raises the error that names the remedy
    raise StoreError(
        f"the embedder {view.fingerprint!r} of the view {view.name!r} is unknown",
        hint="set --embed if sentence-transformers can load it, or use Python",
    )
