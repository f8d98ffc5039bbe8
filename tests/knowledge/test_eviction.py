from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import NotFoundError, SettingError, StoreBusyError, StoreFullError
from bottega.knowledge import (
    Eviction,
    KnowledgeBase,
    LeastFrequentlyUsedEviction,
    LeastRecentlyUsedEviction,
    LeastSavingsEviction,
    RandomEviction,
)
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, rows_of, text_example

POLICIES: list[Callable[[], Eviction]] = [
    lambda: RandomEviction(3),
    LeastRecentlyUsedEviction,
    lambda: LeastFrequentlyUsedEviction(protect=1),
    lambda: LeastSavingsEviction(protect=1),
]


def opened(
    capacity: int, evict: Eviction | None = None, path: object = ":memory:"
) -> KnowledgeBase:
    return KnowledgeBase.open(str(path), SeededEmbedder(), capacity=capacity, evict=evict)


def texts(kb: KnowledgeBase) -> str:
    return "".join(sorted(example.query.text for example in kb))


def id_of(kb: KnowledgeBase, text: str) -> str:
    return next(str(example.id) for example in kb if example.query.text == text)


def test_default_policy_evicts_the_least_recently_used() -> None:
    with opened(3) as kb:
        kb.add([text_example(text) for text in "abc"])
        kb.used([id_of(kb, "a")])
        kb.add([text_example("d")])
        assert texts(kb) == "acd"
        assert {c.example.query.text for c in kb.search(Query("x"), 9)} == set("acd")


def test_least_frequently_used_goes_except_the_newest() -> None:
    with opened(4, LeastFrequentlyUsedEviction(protect=2)) as kb:
        kb.add([text_example(text) for text in "abcd"])
        for _ in range(3):
            kb.used([id_of(kb, "a")])
        kb.used([id_of(kb, "b")])
        kb.add([text_example("e")])
        assert texts(kb) == "abde"
        kb.add([text_example("f")])
        assert texts(kb) == "abef"
        kb.add([text_example("g")])
        assert texts(kb) == "abfg"


def test_largest_savings_stay() -> None:
    with opened(3, LeastSavingsEviction(protect=1)) as kb:
        kb.add([text_example(text) for text in "abc"])
        kb.used([id_of(kb, "a")], saved_usd=0.01)
        for _ in range(9):
            kb.used([id_of(kb, "b")], saved_usd=0.0001)
        kb.add([text_example("d")])
        assert texts(kb) == "abd"
        kb.add([text_example("e")])
        assert texts(kb) == "abe"
        kb.add([text_example("f")])
        assert texts(kb) == "abf"


def test_random_eviction_depends_only_on_its_seed() -> None:
    def survivors(seed: int) -> str:
        with opened(5, RandomEviction(seed)) as kb:
            for text in "abcdefghijklmnop":
                kb.add([text_example(text)])
            return texts(kb)

    assert survivors(1) == survivors(1)
    assert len({survivors(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_examples_never_go(policy: Callable[[], Eviction]) -> None:
    with opened(3, policy()) as kb:
        kb.add([text_example("a"), text_example("b")])
        assert kb.pin([id_of(kb, "a")]) == 1
        for i in range(20):
            kb.add([text_example(f"{i}")])
        assert "a" in texts(kb)
        assert kb.stats().pinned == 1
        assert kb.pin(kb.ids()) == 2
        assert kb.unpin(kb.ids()[1:]) == 2
        assert kb.unpin(kb.ids()) == 1
        assert kb.stats().pinned == 0


def test_import_of_pinned_examples_up_to_the_capacity(tmp_path: Path) -> None:
    with opened(2) as kb:
        kb.add([text_example("a"), text_example("b")])
        kb.pin(kb.ids())
        kb.export_to(tmp_path / "export")
    with opened(2) as kb:
        kb.import_from(tmp_path / "export")
        assert (texts(kb), kb.stats().pinned) == ("ab", 2)
    with opened(1) as kb, pytest.raises(StoreFullError):
        kb.import_from(tmp_path / "export")


def test_full_store_of_pinned_examples_rejects_new_ones() -> None:
    with opened(2) as kb:
        kb.add([text_example("a"), text_example("b")])
        kb.pin(kb.ids())
        with pytest.raises(StoreFullError, match="pinned") as raised:
            kb.add([text_example("c")])
        assert "unpin" in raised.value.hint
        assert texts(kb) == "ab"
        kb.unpin(kb.ids()[:1])
        kb.add([text_example("c")])
        assert texts(kb) == "bc"


def test_metadata_has_age_pin_and_counters() -> None:
    with opened(9) as kb:
        kb.add([text_example("a"), text_example("b")])
        first, second = kb.ids()
        before = time.time()
        kb.used([first, first], 0.5)
        kb.pin([second])
        found = [kb.metadata(id[:8]) for id in (first, second)]
        assert [(each.uses, each.pinned) for each in found] == [(2, False), (0, True)]
        assert [each.saved_usd for each in found] == [0.5, 0.0]
        assert (found[0].last_used or 0.0) >= before and found[1].last_used is None
        assert all(0 < each.created <= before for each in found)
        with pytest.raises(NotFoundError):
            kb.metadata("0123456789abcdef")


def test_pinning_is_all_or_nothing() -> None:
    with opened(9) as kb:
        kb.add([text_example("a")])
        with pytest.raises(NotFoundError):
            kb.pin([kb.ids()[0], "0123456789abcdef"])
        assert kb.stats().pinned == 0


def test_batch_larger_than_the_capacity_keeps_the_capacity() -> None:
    with opened(4) as kb:
        assert kb.add([text_example(f"q{i}") for i in range(100)]).new == 100
        assert len(kb) == 4


def test_each_namespace_has_its_own_capacity(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder(), namespace="other") as other:
        other.add([text_example(f"q{i}") for i in range(9)])
        with opened(3, path=path) as kb:
            kb.add([text_example(f"q{i}") for i in range(5)])
            assert len(kb) == 3
        assert len(other) == 9


def test_counts_are_written_in_batches_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        a, b = kb.ids()
        kb.used([a, b], saved_usd=1.0)
        kb.used([a, "gone"])
        assert counts(path) == []
    assert counts(path) == [(2, 0.5), (1, 0.5)]
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        for _ in range(2):
            kb.used([a])
    assert counts(path) == [(4, 0.5), (1, 0.5)]


def counts(path: Path) -> list[tuple[int, float]]:
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT count, saved_usd FROM uses ORDER BY key").fetchall()
    connection.close()
    return found


def test_failed_writes_of_uses_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise an example with large savings would be evicted as if it had none."""
    with opened(9, LeastSavingsEviction()) as kb:
        kb.add([text_example("a")])
        id = id_of(kb, "a")
        kb.used([id], saved_usd=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(kb._uses, "_write", _raising(StoreBusyError("another process writes")))
            with pytest.raises(StoreBusyError):
                kb._uses.flush()
        kb.used([id], saved_usd=0.25)
        kb._uses.flush()
        [row] = rows_of(kb).read("SELECT count, saved_usd FROM uses")
        assert tuple(row) == (2, 0.75)


def test_protect_may_be_zero() -> None:
    with opened(2, LeastFrequentlyUsedEviction(protect=0)) as kb:
        kb.add([text_example("a"), text_example("b")])
        kb.used([id_of(kb, "a")])
        kb.used([id_of(kb, "b")])
        kb.add([text_example("c")])
        assert texts(kb) == "ab"  # the new one was never used
    for policy in (LeastFrequentlyUsedEviction, LeastSavingsEviction):
        with pytest.raises(SettingError, match="got -1"):
            policy(protect=-1)


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_many_uses_are_written_early(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(300)])
        kb.used(kb.ids())
        assert len(counts(path)) == 300


def test_invalid_settings_are_rejected() -> None:
    for wrong in (
        lambda: opened(0),
        lambda: LeastFrequentlyUsedEviction(protect=-1),
        lambda: KnowledgeBase.open(":memory:", None, evict=RandomEviction()),
    ):
        with pytest.raises(SettingError):
            wrong()


@given(
    st.integers(1, 6),
    st.sampled_from(range(len(POLICIES))),
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), max_size=8),
)
@settings(max_examples=40)
def test_commits_never_exceed_the_capacity(
    capacity: int, policy: int, batches: list[list[int]]
) -> None:
    with opened(capacity, POLICIES[policy]()) as kb:
        for batch in batches:
            kb.add([text_example(f"{number}") for number in batch])
            assert 0 < len(kb) <= capacity
            assert len(kb.search(Query("any"), 99)) == len(kb)
            kb.used(kb.ids())


@pytest.mark.parametrize(
    ("ids", "usd"),
    [(["x"], float("nan")), (["x"], float("inf")), (["x"], "1"), (["\ud83d"], 1.0), ([5], 1.0)],
)
def test_invalid_use_does_not_block_others(tmp_path: Path, ids: list[str], usd: float) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        kb.used(kb.ids(), 1.0)
        with pytest.raises(SettingError, match="finite amount"):
            kb.used(ids, usd)
    with KnowledgeBase.open(path, None) as kb:
        assert rows_of(kb).metadata_by_id([1])[1].uses == 1


def test_read_only_file_can_be_used_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        rows_of(kb)._writer.execute("PRAGMA query_only = 1")
        kb.used(kb.ids())
