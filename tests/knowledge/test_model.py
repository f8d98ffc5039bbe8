"""Any sequence of operations agrees with a plain list of examples."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bottega.errors import EmptyKnowledgeBaseError
from bottega.knowledge import AddResult, KnowledgeBase
from bottega.types import Example
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example, vector_of

examples = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"]), st.booleans()), max_size=6
)


def build(number: int, answer: str, with_image: bool) -> Example:
    return image_example(number, answer) if with_image else text_example(f"q{number}", answer)


def key_of(example: Example) -> tuple[object, ...]:
    return (example.query.text, example.query.images, example.answer)


class Store(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: list[Example] = []
        self.open()

    def open(self) -> None:
        path = Path(self.folder.name) / "kb.db"
        self.kb = KnowledgeBase.open(path, SeededEmbedder())

    @rule(fields_list=examples, batch_size=st.integers(1, 4))
    def add(self, fields_list: list[tuple[int, str, bool]], batch_size: int) -> None:
        new = 0
        for example in (build(*fields) for fields in fields_list):
            if key_of(example) not in map(key_of, self.model):
                self.model.append(example)
                new += 1
        added = self.kb.add([build(*fields) for fields in fields_list], batch_size=batch_size)
        assert added == AddResult(new=new, duplicates=len(fields_list) - new)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.integers(0, max(0, len(self.model) - 1)), max_size=3))
        ids = [id for index, id in enumerate(self.kb.ids()) if index in chosen]
        assert self.kb.delete(ids) == len(ids)
        self.model = [e for index, e in enumerate(self.model) if index not in chosen]

    @rule(number=st.integers(0, 12), with_image=st.booleans(), k=st.integers(1, 8))
    def search(self, number: int, with_image: bool, k: int) -> None:
        query = build(number, "", with_image).query
        if not self.model:
            with pytest.raises(EmptyKnowledgeBaseError):
                self.kb.search(query, k)
            return
        own = set(query.images)
        scores = [
            float(vector_of(e.query) @ vector_of(query))
            for e in self.model
            if own.isdisjoint(e.query.images)
        ]
        found = self.kb.search(query, k)
        assert [c.score for c in found] == pytest.approx(sorted(scores)[::-1][:k], abs=1e-5)
        for candidate in found:
            again = float(vector_of(candidate.example.query) @ vector_of(query))
            assert np.isclose(candidate.score, again, atol=1e-5)

    @rule()
    def reopen(self) -> None:
        self.kb.close()
        self.open()

    @invariant()
    def holds_the_same_in_the_same_order(self) -> None:
        assert [key_of(e) for e in self.kb] == [key_of(e) for e in self.model]
        assert self.kb.labels() == list(dict.fromkeys(e.answer for e in self.model))

    def teardown(self) -> None:
        self.kb.close()
        self.folder.cleanup()


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=15)
