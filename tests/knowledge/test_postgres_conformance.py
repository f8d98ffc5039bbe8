"""Behaviour of a knowledge base in PostgreSQL, also with Milvus: the tests of a file that use the
fixture `kb`, with the `EXAMPLES` of their module in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from bottega.knowledge import KnowledgeBase
from tests.knowledge import (
    test_add,
    test_annotate,
    test_base,
    test_choices,
    test_listing,
    test_replace,
)
from tests.knowledge.doubles import SeededEmbedder

MODULES = (test_add, test_annotate, test_base, test_choices, test_listing, test_replace)
# Tests of SQLite's connections, caches and damaged rows.
OF_FILES: set[str] = set()


@pytest.fixture
def kb(
    request: pytest.FixtureRequest, database: str, vectors: dict[str, Any]
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(database, SeededEmbedder(), **vectors) as opened:
        opened.add(getattr(sys.modules[request.function.__module__], "EXAMPLES", ()))
        yield opened


def behaviours(module: ModuleType) -> dict[str, Callable[..., object]]:
    """Return the tests of a module that use nothing but the fixture and parameters."""
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_")
        and "kb" in signature(test).parameters
        and not {"tmp_path", "path", "monkeypatch"} & signature(test).parameters.keys()
        and name not in OF_FILES
    }


for module in MODULES:
    globals().update(behaviours(module))
