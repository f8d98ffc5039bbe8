"""From a file's name to an open knowledge base."""

from __future__ import annotations

from pathlib import Path

from bottega.cli.namespaces import check_filled
from bottega.cli.resolving import BUNDLED, open_embedder
from bottega.errors import StoreError
from bottega.knowledge import KnowledgeBase

NOTE = "embed"


def open_rows(file: Path, namespace: str = "") -> KnowledgeBase:
    """Opens for reading and deleting rows: no embedder is loaded."""
    if not file.exists():
        raise StoreError(f"there is no knowledge base {file}", hint=f"bottega add {file} FOLDER")
    return KnowledgeBase.open(file, embed=None, create=False, namespace=namespace)


def open_to_search(file: Path, embed: str | None, namespace: str) -> KnowledgeBase:
    """Without `embed`, by the embedder that built the file."""
    with open_rows(file, namespace) as rows:
        check_filled(rows, file, namespace)
        spec = embed or rows.note(NOTE) or BUNDLED
    return KnowledgeBase.open(file, open_embedder(spec), namespace=namespace)


def open_to_add(file: Path, embed: str | None, namespace: str = "") -> KnowledgeBase:
    """Creates the file if it is not there, and notes in it by which embedder."""
    spec = embed or (_noted(file) if file.exists() else None) or BUNDLED
    knowledge = KnowledgeBase.open(file, open_embedder(spec), namespace=namespace)
    if knowledge.note(NOTE) != spec:
        knowledge.set_note(NOTE, spec)
    return knowledge


def open_to_repair(file: Path, embed: str | None) -> KnowledgeBase:
    """Every namespace is looked at; the embedder makes missing vectors again."""
    spec = embed or _noted(file) or BUNDLED
    return KnowledgeBase.open(file, open_embedder(spec), create=False)


def _noted(file: Path) -> str | None:
    with open_rows(file) as rows:
        return rows.note(NOTE)
