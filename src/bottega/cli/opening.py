"""From a file's name to an open knowledge base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bottega.cli.namespaces import check_filled
from bottega.cli.resolving import open_embedder
from bottega.cli.views import (
    check_read_alike,
    chosen,
    maker,
    read_otherwise,
    to_add,
    to_repair,
    told_to_type,
)
from bottega.errors import EmbedderMismatchError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.views import DEFAULT
from bottega.naming import BUNDLED, NOTE


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
