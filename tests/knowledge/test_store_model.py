"""Any sequence of operations from two handles agrees with a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from bottega.errors import EmptyKnowledgeBaseError
from bottega.knowledge import Eq, KnowledgeBase
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, text_example, vector_of
from tests.postgres import PostgresServer

HANDLES, HUES = st.integers(0, 1), ("red", "green", "blue")
CAPACITY = 40
# So low that most sequences get to graphs, snapshots and rebuilding.
HNSW_ABOVE = 6


def hue_of(text: str) -> str:
    return HUES[int(text) % len(HUES)]


class TwoHandles(RuleBasedStateMachine):
    texts = Bundle("texts")

    @initialize()
    def begin(self) -> None:
        self.location = self.created()
        self.derived: dict[str, str] = {}  # question to id
        self.pinned: set[str] = set()
        self.rationales: dict[str, str] = {}
        self.handles = [self.opened(), self.opened()]

    def created(self) -> str:
        """Return the location of a new knowledge base."""
        return str(Path(tempfile.mkdtemp()) / "kb.db")

    def remove(self) -> None:
        shutil.rmtree(Path(self.location).parent, ignore_errors=True)

    def opened(self) -> KnowledgeBase:
        embed = SeededEmbedder()
        return KnowledgeBase.open(self.location, embed, hnsw_above=HNSW_ABOVE, capacity=CAPACITY)

    @rule(target=texts, handle=HANDLES, numbers=st.lists(st.integers(0, 99), max_size=12))
    def add(self, handle: int, numbers: list[int]) -> object:
        kb = self.handles[handle]
        fresh = {str(n) for n in numbers} - self.derived.keys()
        room = CAPACITY - len(self.derived)
        added = kb.add([text_example(str(n), tags={"hue": hue_of(str(n))}) for n in numbers])
        assert (added.new, added.duplicates) == (len(fresh), len(numbers) - len(fresh))
        there = {e.query.text: str(e.id) for e in kb}
        assert fresh <= there.keys()
        assert len(there) == len(self.derived) + min(len(fresh), room)
        assert there.keys() <= self.derived.keys() | fresh
        assert self.pinned <= there.keys()
        self.derived = there
        self.rationales = {t: r for t, r in self.rationales.items() if t in there}
        return multiple(*sorted(fresh))

    @rule(handle=HANDLES, text=consumes(texts))
    def delete(self, handle: int, text: str) -> None:
        if text in self.derived:
            assert self.handles[handle].delete([self.derived.pop(text)]) == 1
            self.pinned.discard(text)
            self.rationales.pop(text, None)

    @rule(handle=HANDLES, text=texts)
    def pin(self, handle: int, text: str) -> None:
        if text in self.derived and len(self.pinned) < 5:
            self.handles[handle].pin([self.derived[text]])
            self.pinned.add(text)

    @rule(handle=HANDLES, text=texts, rationale=st.text("ab", min_size=1))
    def annotate(self, handle: int, text: str, rationale: str) -> None:
        if text in self.derived:
            self.handles[handle].annotate(self.derived[text], rationale=rationale)
            self.rationales[text] = rationale

    @rule(handle=HANDLES)
    def use(self, handle: int) -> None:
        self.handles[handle].used(list(self.derived.values())[:3], saved_usd=0.01)

    @rule(handle=HANDLES, number=st.integers(0, 99), k=st.integers(1, 8))
    def search(self, handle: int, number: int, k: int) -> None:
        self.agree(handle, str(number), k, None)

    @rule(handle=HANDLES, number=st.integers(0, 99), hue=st.sampled_from(HUES))
    def search_filtered(self, handle: int, number: int, hue: str) -> None:
        self.agree(handle, str(number), 5, hue)

    def agree(self, handle: int, text: str, k: int, hue: str | None) -> None:
        kb = self.handles[handle]
        where = None if hue is None else Eq("tags.hue", hue)
        if not self.derived:
            try:
                kb.search(Query(text), k, where=where)
            except EmptyKnowledgeBaseError:
                return
            raise AssertionError("an empty knowledge base answered")
        found = kb.search(Query(text), k, where=where)
        query = vector_of(Query(text))
        scores = {
            each: float(np.dot(query, vector_of(Query(each))))
            for each in self.derived
            if hue is None or hue_of(each) == hue
        }
        best = sorted(scores.values(), reverse=True)[:k]
        # Forty rows are few for a graph with this effort: approximate is exact here.
        np.testing.assert_allclose([c.score for c in found], best, atol=1e-5)
        for candidate in found:
            assert candidate.example.query.text in scores
            rationale = candidate.example.rationale
            assert rationale == self.rationales.get(candidate.example.query.text)

    @rule(handle=HANDLES)
    def reopen(self, handle: int) -> None:
        self.handles[handle].wait_for_indexes()
        self.handles[handle].close()
        self.handles[handle] = self.opened()

    @rule(handle=HANDLES)
    def verify(self, handle: int) -> None:
        assert self.handles[handle].verify().problems == ()

    @invariant()
    def both_handles_count_the_same(self) -> None:
        for kb in getattr(self, "handles", []):
            assert len(kb) == len(self.derived)

    def teardown(self) -> None:
        for kb in getattr(self, "handles", []):
            kb.close()
        if hasattr(self, "location"):
            self.remove()


STEPS = settings(max_examples=25, stateful_step_count=25)
TestTwoHandles = TwoHandles.TestCase
TestTwoHandles.settings = STEPS


@pytest.mark.slow
def test_two_handles_in_postgres(postgres: PostgresServer) -> None:
    class PostgresHandles(TwoHandles):
        def created(self) -> str:
            return postgres.create_schema()

        def remove(self) -> None:
            postgres.leave_schema()

    run_state_machine_as_test(PostgresHandles, settings=STEPS)
