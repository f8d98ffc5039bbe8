"""Which vectors of a file the command line can search by, and which it can make.

Searching takes a view's embedder alone. Making vectors also takes what of an example the view
reads, which is Python and stands in no file: the command line makes the views that it began
itself, and the one called `default`, which a bare embedder fills, unless its first vectors are of
something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bottega.errors import EmbedderMismatchError, SettingError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.ports import StoredView
from bottega.knowledge.views import DEFAULT, check_name
from bottega.naming import BUNDLED, NOTE

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
