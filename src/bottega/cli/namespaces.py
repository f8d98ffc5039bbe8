"""What people are told of a file's namespaces: a handle sees one and nothing of the others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from bottega.errors import EmptyKnowledgeBaseError
from bottega.knowledge import KnowledgeBase

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
