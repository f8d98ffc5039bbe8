from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.knowledge import And, Contains, Eq, Filter, In, KnowledgeBase, Range
from bottega.knowledge.filters import MAX_PARTS
from bottega.knowledge.sqlite import search as search_module
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.types import Example, Query
from tests.knowledge.doubles import SeededEmbedder, rows_of, search_of, text_example

ODD = 'a "quoted".name'


EXAMPLES = [
    text_example("a", "x", tags={"hue": "red", "year": "9", ODD: "1"}, source="s1"),
    text_example("b", "x, y", labels=("x", "y"), tags={"hue": "red", "year": "10"}),
    text_example("c", "y", tags={"hue": "blue", ODD: "2"}, source="s2"),
]


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        opened.add(EXAMPLES)
        yield opened


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (Eq("tags.hue", "red"), "ab"),
        (Eq(f"tags.{ODD}", "2"), "c"),
        (In(f"tags.{ODD}", ("1", "2")), "ac"),
        (Eq("source", "s2"), "c"),
        (Eq("label", "y"), "bc"),
        (In("label", ("x", "none")), "ab"),
        (In("source", ()), ""),
        (In("source", ("s1", "s2")), "ac"),
        (Range("tags.year", 9, 10), "ab"),
        (Range("tags.year", low="9"), "a"),
        (Range("created", low=time.time() + 3600), ""),
        (Range("created", high=time.time() + 3600), "abc"),
        (Eq("namespace", ""), "abc"),
        (And((Eq("tags.hue", "red"), Eq("source", "s1"))), "a"),
        (And(()), "abc"),
        (Contains("A"), "a"),
        (Contains("Y"), "bc"),
        (Contains(""), "abc"),
        (Contains("%"), ""),
        (And((Contains("x"), Eq("source", "s1"))), "a"),
        (And((And((Eq("label", "y"),)), Range("tags.year", low=0))), "b"),
    ],
)
def test_filter_selects_examples(kb: KnowledgeBase, where: Filter, found: str) -> None:
    assert "".join(e.query.text for e in kb.get_many(kb.ids(where=where))) == found
    hits = kb.search(Query("q"), 9, where=where)
    assert sorted(c.example.query.text for c in hits) == list(found)


def test_cached_filter_sees_later_changes(
    kb: KnowledgeBase,
) -> None:
    red = Eq("tags.hue", "red")
    assert len(kb.search(Query("q"), 9, where=red)) == 2
    kb.add([text_example("d", tags={"hue": "red"}), text_example("e")])
    kb.delete(kb.ids()[:1])
    assert {c.example.query.text for c in kb.search(Query("q"), 9, where=red)} == {"b", "d"}


def test_cached_filter_drops_deleted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MAX_DELETED", 10)
    red = Eq("tags.hue", "red")
    with KnowledgeBase.open(":memory:", SeededEmbedder(), capacity=5) as kb:
        for i in range(20):
            kb.add([text_example(f"{i}/{j}", tags={"hue": "red"}) for j in range(5)])
            assert len(kb.search(Query("q"), 9, where=red)) == 5
        resolved = search_of(kb)._filters.get(red)
        assert resolved is not None and len(resolved.keys) <= 10 + 2 * 5 + 5


def test_only_recent_filters_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MAX_FILTERS", 3)
    resolved: list[Filter] = []
    keys_where = SqliteRows.keys_where

    def counted(rows: SqliteRows, where: Filter, after: int = 0) -> list[int]:
        resolved.append(where)
        return keys_where(rows, where, after)

    monkeypatch.setattr(SqliteRows, "keys_where", counted)
    first, *rest = (Eq("tags.hue", hue) for hue in ("red", "blue", "green", "pink", "grey"))
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a", tags={"hue": "red"})])

        def search(where: Filter) -> int:
            return len(kb.search(Query("q"), 9, where=where))

        for where in rest[:2]:
            search(where)
        for where in rest:  # the first of them are evicted, `first` is used all the time
            assert (search(first), search(where)) == (1, 0)
        assert resolved == [*rest[:2], first, *rest[2:]]
        assert search(rest[0]) == 0
        assert resolved[-1] == rest[0] and len(resolved) == 6
        assert len(search_of(kb)._filters) == 3


def test_where_and_within_are_combined(kb: KnowledgeBase) -> None:
    hits = kb.search(Query("q"), 9, where=Eq("tags.hue", "red"), within=kb.ids()[1:])
    assert [c.example.query.text for c in hits] == ["b"]


@pytest.mark.parametrize("name", ["colour", "tags.", "id", ""])
def test_unknown_field_error_lists_the_fields(name: str) -> None:
    for filter_of in (Eq, lambda field, value: In(field, (value,)), Range):
        with pytest.raises(SettingError) as raised:
            filter_of(name, "x")
        assert "tags.NAME" in raised.value.hint
    with pytest.raises(SettingError, match="filter field is unknown"):
        In(name, ())


def test_range_requires_a_bound() -> None:
    with pytest.raises(SettingError, match="no bound"):
        Range("created")


names = st.sampled_from(["n", "m"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)


def satisfied(example: Example, where: Filter) -> bool:
    match where:
        case And(parts):
            return all(satisfied(example, part) for part in parts)
        case Eq(name, value):
            return example.tags.get(name[5:]) == value
        case In(name, values):
            return example.tags.get(name[5:]) in values
        case Range(name, low, high):
            text = example.tags.get(name[5:])
            above = low is None or str(low).encode() <= str(text).encode()
            below = high is None or str(text).encode() <= str(high).encode()
            return text is not None and above and below
        case Contains(text):
            spoken = (example.query.text, example.answer)
            return any(text.encode().lower() in each.encode().lower() for each in spoken)


leaves: st.SearchStrategy[Filter] = st.one_of(
    st.builds(lambda n, v: Eq(f"tags.{n}", v), names, texts),
    st.builds(lambda n, v: In(f"tags.{n}", v), names, st.lists(texts).map(tuple)),
    st.builds(lambda n, low, high: Range(f"tags.{n}", low, high), names, texts, texts),
    st.builds(Contains, st.text("qYeS01É", max_size=2)),
)


@given(
    st.lists(st.dictionaries(names, texts), min_size=1, max_size=6),
    st.recursive(leaves, lambda inner: st.builds(And, st.lists(inner, max_size=3).map(tuple))),
)
@settings(max_examples=60)
def test_filters_agree_with_plain_python(tags: list[dict[str, str]], where: Filter) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}", tags=each) for i, each in enumerate(tags)])
        everything = list(kb)
        expected = [e.id for e in everything if satisfied(e, where)]
        assert kb.ids(where=where) == expected
        found = {c.example.id for c in kb.search(Query("q"), 9, where=where)}
        assert found == set(expected)


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", True), ("-1", True), ("1e0", True), ("007", False), ("0.50", True), ("1e999", False)]
    + [(text, False) for text in ("", "abc", "0abc", "inf", "nan", "2", "1 2")],
)
def test_numeric_range_ignores_other_texts(text: str, found: bool) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("q", text or "none", tags={"n": text})])
        assert len(kb.ids(where=Range("tags.n", -1, 1))) == found
        assert len(kb.ids(where=And((Range("tags.n", low=-1), Range("tags.n", high=1))))) == found
        assert len(kb.ids(where=Range("label", -1, 1))) == found


@pytest.mark.parametrize(
    "make",
    [
        lambda: Eq("tags.year", 9),
        lambda: In("label", ("x", 5)),
        lambda: In("label", "cat"),  # type: ignore[arg-type]
        lambda: Eq("source", "\ud83d"),
        lambda: Eq("tags.\ud83d", "x"),
        lambda: In("label", ("a\0",)),
        lambda: Eq("created", 2**70),
        lambda: Eq("created", 2**63),
        lambda: Eq("created", -(2**63)),
        lambda: Eq("created", float("nan")),
        lambda: Range("created", low=None, high=[1]),  # type: ignore[arg-type]
        lambda: Eq("source", None),  # type: ignore[arg-type]
        lambda: Eq(5, "x"),  # type: ignore[arg-type]
        lambda: Eq("source", True),
        lambda: In("namespace", (1,)),
        lambda: Range("source", 1),
        lambda: Range("tags.n", True),
        lambda: Eq("created", True),
    ],
)
def test_impossible_filter_values_are_an_error(make: Callable[[], Filter]) -> None:
    with pytest.raises(SettingError) as raised:
        make()
    assert raised.value.hint


@pytest.mark.parametrize("day", ["2026-01-01", datetime(2026, 1, 1)])
def test_created_is_compared_in_seconds(day: Any) -> None:
    for make in (
        lambda: Range("created", low=day),
        lambda: Eq("created", day),
        lambda: In("created", (day,)),
    ):
        with pytest.raises(SettingError) as raised:
            make()
        assert "seconds since 1970" in raised.value.hint


class Colour(str, Enum):  # noqa: UP042 - the str() of a StrEnum is its value
    RED = "red"


@pytest.mark.parametrize(
    "where",
    [
        Eq("label", Colour.RED),
        Eq("tags.c", Colour.RED),
        In("tags.c", (Colour.RED,)),
        Range("label", Colour.RED, Colour.RED),
    ],
)
def test_members_of_text_enumerations_are_texts(where: Filter) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("q", "red", tags={"c": "red"}), text_example("r", "Colour.RED")])
        assert kb.ids(where=where) == kb.ids(label="red")


def test_filters_may_be_nested_deeply() -> None:
    where: Filter = Eq("label", "yes")
    for _ in range(5000):
        where = And((where,))
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b", "no")])
        assert len(kb.ids(where=where)) == 1
        assert [c.example.answer for c in kb.search(Query("b"), 2, where=where)] == ["yes"]


def test_number_of_filter_parts_is_limited() -> None:
    parts: list[Filter] = [Eq("tags.a/b", "x"), Eq("label", "yes"), Range("tags.n", 0, 9)]
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a", tags={"a/b": "x", "n": "3"})])
        whole = And(tuple(parts[i % 3] for i in range(MAX_PARTS - 1)))
        assert len(kb.ids(label="yes", where=whole)) == 1
        with pytest.raises(SettingError, match="got 501"):
            kb.ids(label="yes", source="s", where=whole)


def test_in_accepts_many_values_and_numpy_numbers() -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b", "7")])
        assert len(kb.ids(where=In("label", tuple(map(str, range(100_000)))))) == 1
        (created,) = rows_of(kb).read("SELECT created FROM examples WHERE key = 2")[0]
        assert len(kb.ids(where=In("created", (np.float64(created), 0)))) == 1
