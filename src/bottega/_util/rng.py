"""Random states that depend on a query."""

from __future__ import annotations

import random

from bottega._util.identity import query_key
from bottega.types import Query


def query_rng(query: Query, seed: object) -> random.Random:
    """Return a generator seeded by the query's content, so results do not depend on query order."""
    return random.Random(f"{seed}:{':'.join(query_key(query))}")
