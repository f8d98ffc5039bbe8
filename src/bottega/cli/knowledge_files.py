"""From a file's name to an open knowledge base."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bottega.cli.components import open_embedder
from bottega.errors import EmbedderMismatchError, EmptyKnowledgeBaseError, SettingError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.ports import StoredView
from bottega.knowledge.views import DEFAULT, check_name
from bottega.naming import BUNDLED, NOTE

NAMED_AT_MOST = 5


def whole_name(file: Path, namespace: str) -> str:
    return f"{file}, namespace {namespace!r}," if namespace else str(file)


def others(knowledge: KnowledgeBase, namespace: str) -> dict[str, int]:
    """How many examples the file's other namespaces hold."""
    counts = knowledge.namespaces()
    return {name: count for name, count in counts.items() if name != namespace}


def counted(namespaces: Mapping[str, int]) -> str:
    """`12 in 'team-a', 3 in 'team-b'`; of very many only the first."""
    shown = [f"{count} in {name!r}" for name, count in namespaces.items()]
    more = len(shown) - NAMED_AT_MOST
    return ", ".join(
        [*shown[:NAMED_AT_MOST], *([f"and {more} more namespaces"] if more > 0 else [])]
    )


def option_for(namespaces: Mapping[str, int]) -> str:
    """As it may be pasted into a shell."""
    return f"--namespace {shlex.quote(next(iter(namespaces))) if len(namespaces) == 1 else 'NAME'}"


def none_here(namespace: str, elsewhere: Mapping[str, int]) -> str:
    return f"no examples in namespace {namespace!r}; there are {counted(elsewhere)}"


def check_filled(knowledge: KnowledgeBase, file: Path, namespace: str) -> None:
    """Raises `EmptyKnowledgeBaseError`, which says where there are examples."""
    if len(knowledge):
        return
    if elsewhere := others(knowledge, namespace):
        raise EmptyKnowledgeBaseError(
            none_here(namespace, elsewhere), hint=f"give {option_for(elsewhere)}"
        )
    raise EmptyKnowledgeBaseError(f"{file} is empty", hint=f"bottega add {file} FOLDER")


def open_rows(file: Path, namespace: str = "") -> KnowledgeBase:
    """Opens for reading and deleting rows: no embedder is loaded."""
    if not file.exists():
        raise StoreError(f"there is no knowledge base {file}", hint=f"bottega add {file} FOLDER")
    return KnowledgeBase.open(file, embed=None, create=False, namespace=namespace)


def open_to_search(file: Path, embed: str | None, namespace: str, by: str | None) -> KnowledgeBase:
    """With one view, by which it is searched. Without `embed`, the embedder that made it."""
    with open_rows(file, namespace) as rows:
        check_filled(rows, file, namespace)
        view = chosen(rows.views(), by, file)
        spec = embed or maker(rows, view)
    with _told_to_type(file, embed):
        return KnowledgeBase.open(file, _opened({view.name: spec}), namespace=namespace)


def open_to_add(file: Path, embed: str | None, namespace: str) -> KnowledgeBase:
    """With all views of the file, which is created if it is not there."""
    specs = {DEFAULT: embed or BUNDLED}
    if file.exists():
        with open_rows(file) as rows:
            specs = to_add(rows, embed, file)
            check_read_alike(rows, views := _opened(specs), file)
    else:
        views = _opened(specs)
    with _told_to_type(file, embed):
        knowledge = KnowledgeBase.open(file, views, namespace=namespace)
    if DEFAULT in specs and knowledge.note(NOTE) != specs[DEFAULT]:
        knowledge.set_note(NOTE, specs[DEFAULT])
    return knowledge


def open_to_repair(file: Path, embed: str | None) -> KnowledgeBase:
    """With those views whose vectors can be made again; of the others verifying tells."""
    with open_rows(file) as rows:
        views = _opened(to_repair(rows, embed, file))
        if embed is not None:
            check_read_alike(rows, views, file)
        for name in read_otherwise(rows, views):
            del views[name]
    with _told_to_type(file, embed):
        return KnowledgeBase.open(file, views or None, create=False)


@contextmanager
def _told_to_type(file: Path, embed: str | None) -> Iterator[None]:
    try:
        yield
    except EmbedderMismatchError as error:
        with open_rows(file) as rows:
            told = told_to_type(error, rows, embed, file)
        raise told from error


def _opened(specs: Mapping[str, str]) -> dict[str, View]:
    return {name: View(open_embedder(spec)) for name, spec in specs.items()}


TOWER, TOKENS = r"tower-\d+ \S+", r"tokens-\d+ \S+"
# Fingerprints of the embedders that come with the package tell which, and nothing is loaded.
CARRIED = {
    "pixels": r"pixels-\d+ hog\d+ rgb\d+ dct\d+",
    BUNDLED: TOWER,
    "words": TOKENS,
    "dual": rf"dual \({TOWER}\) \({TOKENS}\)",
}


def chosen(stored: Mapping[str, StoredView], by: str | None, file: Path) -> StoredView:
    """`by`, or else the only view, or `default`."""
    if not stored:
        raise StoreError(
            f"the examples of {file} have no vectors", hint=f"bottega verify {file} --repair"
        )
    names = ", ".join(stored)
    if by is None and len(stored) > 1 and DEFAULT not in stored:
        raise SettingError(f"{file} has several views: {names}", hint="choose one with --by")
    if by is not None and by not in stored:
        raise SettingError(f"{file} has no view {by!r}", hint=f"--by one of {names}")
    return stored[by or (DEFAULT if DEFAULT in stored else next(iter(stored)))]


def maker(knowledge: KnowledgeBase, view: StoredView) -> str:
    """What --embed would be, by the view's fingerprint or by a note in the file."""
    for spec, pattern in CARRIED.items():
        if re.fullmatch(pattern, view.fingerprint):
            return spec
    if (noted := knowledge.note(_note(view))) is not None:
        return noted
    raise StoreError(
        f"nothing says how to open {view.fingerprint!r}, which made the view {view.name!r}",
        hint="name it with --embed if sentence-transformers can load it, or use Python",
    )


def told_to_type(
    error: EmbedderMismatchError, knowledge: KnowledgeBase, embed: str | None, file: Path
) -> EmbedderMismatchError:
    """What --embed takes, in place of fingerprints where that is known."""
    hint = f"bottega reindex {file} makes its vectors anew"
    if embed is not None:
        made = [view for view in knowledge.views().values() if view.fingerprint == error.stored]
        try:
            (spec,) = {maker(knowledge, view) for view in made}
        except (StoreError, ValueError):
            return error
        anew = f"bottega reindex {file} --embed {embed} makes its vectors anew"
        hint = f"--embed {spec}, or leave it out; {anew}"
    return EmbedderMismatchError(error.stored, error.given, hint=hint)


def to_add(knowledge: KnowledgeBase, embed: str | None, file: Path) -> dict[str, str]:
    """What makes each view of the file, by name; a file without views begins with `default`."""
    stored = knowledge.views()
    if foreign := [name for name, view in stored.items() if not _is_own(knowledge, view)]:
        raise StoreError(
            _only_python_knows(file, foreign),
            hint=f"add from Python: KnowledgeBase.open(path, {{{foreign[0]!r}: View(...), ...}})",
        )
    return _makers(knowledge, stored, embed, file)


def to_repair(knowledge: KnowledgeBase, embed: str | None, file: Path) -> dict[str, str]:
    """As `to_add`, of those views that can be made."""
    stored = knowledge.views()
    own = {name: view for name, view in stored.items() if _is_own(knowledge, view)}
    if own or not stored:
        return _makers(knowledge, own, embed, file)
    if embed is not None:
        raise StoreError(
            _only_python_knows(file, list(stored)), hint="leave --embed out, or repair from Python"
        )
    return {}


def _makers(
    knowledge: KnowledgeBase, stored: Mapping[str, StoredView], embed: str | None, file: Path
) -> dict[str, str]:
    if not stored:
        return {DEFAULT: embed or knowledge.note(NOTE) or BUNDLED}
    specs = {}
    if embed is not None:
        specs[chosen(stored, None, file).name] = embed
    return {name: specs.get(name) or maker(knowledge, view) for name, view in stored.items()}


def check_read_alike(knowledge: KnowledgeBase, views: Mapping[str, View], file: Path) -> None:
    if foreign := read_otherwise(knowledge, views):
        raise StoreError(
            _only_python_knows(file, foreign), hint="KnowledgeBase.open(...) with its View(...)"
        )


def read_otherwise(knowledge: KnowledgeBase, views: Mapping[str, View]) -> list[str]:
    """Python code may have made `default`, too, of what it alone knows."""
    stored = knowledge.views()
    return [
        name
        for name, view in views.items()
        if name in stored
        and stored[name].fingerprint == view.embed.fingerprint  # else opening tells
        and not knowledge.is_made_by(name, view)
    ]


def to_reindex(
    knowledge: KnowledgeBase, embed: str | None, by: str | None, file: Path
) -> tuple[str, str]:
    """The name of the view and its embedder; a new view's is by default that of `default`."""
    stored = knowledge.views()
    name = by
    if name is None:
        name = chosen(stored, None, file).name if stored else DEFAULT
    check_name(name)  # before an embedder is loaded
    if name not in stored:
        return name, embed or knowledge.note(NOTE) or BUNDLED
    if not _is_own(knowledge, stored[name]):
        raise StoreError(
            _only_python_knows(file, [name]),
            hint=f"knowledge.reindex({name!r}, View(...)) in Python, or --by with a new name",
        )
    return name, embed or maker(knowledge, stored[name])


def _is_own(knowledge: KnowledgeBase, view: StoredView) -> bool:
    return view.name == DEFAULT or knowledge.note(_note(view)) is not None


def _only_python_knows(file: Path, names: Sequence[str]) -> str:
    return (
        f"what these views of {file} read is known only to the Python code that made them: "
        f"{', '.join(names)}"
    )


def note_maker(knowledge: KnowledgeBase, name: str, spec: str) -> None:
    """Tells the commands to come that they can make the view, and how."""
    note = _note(knowledge.views()[name])
    if knowledge.note(note) != spec:
        knowledge.set_note(note, spec)


def _note(view: StoredView) -> str:
    # Another embedder gives the view another number: the note is then of a view that is gone.
    return NOTE if view.name == DEFAULT else f"{NOTE}.{view.number}"
