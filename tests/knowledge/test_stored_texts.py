"""Storable texts are returned unchanged; test_add.py tests the others."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.knowledge import AddResult, KnowledgeBase
from bottega.knowledge.filters import Eq, In
from bottega.types import Example, Query
from tests.knowledge.doubles import SeededEmbedder

AWKWARD = "\x1f\x7f\x85\u2028\ufeff\ufffd'\"\\%_.$[]\r\n"
LETTERS = st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from(AWKWARD)
TEXTS = st.text(LETTERS, max_size=5)
NAMES = st.text(LETTERS, min_size=1, max_size=3)


def example(draw: st.DrawFn) -> Example:
    labels = tuple(draw(st.lists(TEXTS, max_size=2, unique=True)))
    query = Query(draw(TEXTS), choices=tuple(draw(st.lists(TEXTS, max_size=2))))
    tags = draw(st.dictionaries(NAMES, TEXTS, max_size=3))
    return Example(query, draw(TEXTS), labels, draw(TEXTS), tags, draw(TEXTS))


@given(st.composite(example)(), TEXTS)
@settings(max_examples=8)
def test_texts_are_returned_unchanged(example: Example, namespace: str) -> None:
    with TemporaryDirectory() as folder:
        path, copy, embed = Path(folder) / "kb.db", Path(folder) / "copy.db", SeededEmbedder()
        with KnowledgeBase.open(path, embed, namespace=namespace) as kb:
            kb.add([example])
            check(kb, example)
            kb.export_to(Path(folder) / "out")
        with KnowledgeBase.open(copy, embed, namespace=namespace) as kb:
            assert kb.import_from(Path(folder) / "out") == AddResult(new=1)
            check(kb, example)


def check(kb: KnowledgeBase, example: Example) -> None:
    (stored,) = kb
    assert without_id(stored) == example
    ids, labels, tags = [stored.id], list(example.labels or ()), dict(example.tags)
    assert kb.labels() == labels
    assert kb.ids_by_label() == dict.fromkeys(labels, ids)
    assert kb.ids(source=example.source, tags=tags) == ids
    assert all(kb.ids(label=label) == ids for label in labels)
    assert all(kb.ids(where=In("label", (label, "?"))) == ids for label in labels)
    assert kb.ids(where=Eq("namespace", kb.stats().namespace)) == ids
    assert without_id(kb.search(Query("any"), 1)[0].example) == example
    assert kb.verify(deep=True).problems == ()


def without_id(example: Example) -> Example:
    query = example.query
    fields = (example.labels, example.rationale, example.tags, example.source)
    return Example(Query(query.text, query.images, query.choices), example.answer, *fields)
