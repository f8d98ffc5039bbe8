"""Filters of a knowledge base in PostgreSQL: the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bottega.knowledge import KnowledgeBase
from tests.knowledge import test_filters
from tests.knowledge.doubles import SeededEmbedder
from tests.knowledge.test_postgres_conformance import behaviours


@pytest.fixture
def kb(database: str) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(database, SeededEmbedder()) as opened:
        opened.add(test_filters.EXAMPLES)
        yield opened


globals().update(behaviours(test_filters))
