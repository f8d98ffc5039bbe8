from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.protocols import Vectors
from bottega.retrieval import HashtagTree
from bottega.retrieval.hashtag_tree import MAX_GROUPS, kmeans, means, spread


def test_the_spread_is_the_distance_to_the_others_of_a_group() -> None:
    vectors = np.array([[0, 0], [4, 0], [0, 9], [3, 9], [6, 9], [70, 70]], np.float32)
    labels = np.array([0, 0, 1, 1, 1, 2])
    assert means(vectors, labels).tolist() == [[2, 0], [3, 9], [70, 70]]
    # Pairs lie 4 apart; of the three the outer ones lie 4.5 from the mean of the others.
    assert spread(vectors, labels) == pytest.approx((4 + 4 + 4.5 + 0 + 4.5) / 5)
    assert spread(vectors[:2], np.array([0, 0])) == pytest.approx(4)


def test_groups_of_one_entry_have_no_spread() -> None:
    assert spread(np.eye(3, dtype=np.float32), np.arange(3)) == 0.0


D = 5
# Steps of a tree: add an id (again), remove it, or re-fit.
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "remove", "refit"]), st.integers(0, 25)),
    max_size=60,
)


def vector(seed: int) -> Vectors:
    """A unit row in the positive corner: a mean of such rows is never zero."""
    row = np.abs(np.random.default_rng(seed).standard_normal(D)) + 0.01
    return np.asarray(row / np.linalg.norm(row), np.float32)


def rows(seeds: Sequence[int]) -> Vectors:
    return np.stack([vector(seed) for seed in seeds])


def played(steps: Sequence[tuple[str, int]], tree: HashtagTree) -> dict[str, Vectors]:
    """Apply the steps and return the expected entries."""
    held: dict[str, Vectors] = {}
    for index, (action, number) in enumerate(steps):
        id = f"e{number}"
        if action == "add":
            held[id] = vector(1000 * number + index)  # an id added again has a new vector
            tree.add([id], held[id][None])
        elif action == "remove":
            held.pop(id, None)
            tree.remove([id])
        else:
            tree.refit()
    return held


@given(steps=STEPS, groups=st.integers(1, 6), counted=st.booleans())
def test_centres_equal_recomputed_means(
    steps: list[tuple[str, int]], groups: int, counted: bool
) -> None:
    tree = HashtagTree(
        (lambda ids, vectors: groups) if counted else groups, cold_start=5, novel=1.5
    )
    held = played(steps, tree)
    members, centres = tree.groups, tree.centres
    assert len(members) == len(centres)
    assert counted or len(centres) <= groups
    assert sorted(id for group in members for id in group) == sorted(held)
    for group, centre in zip(members, centres, strict=True):
        exact = np.mean([held[id].astype(np.float64) for id in group], axis=0)
        assert np.linalg.norm(centre - exact) <= 1e-5 * np.linalg.norm(exact)
        assert np.isfinite(centre).all()
        assert centre.any()


@given(steps=STEPS, k=st.integers(0, 30), seed=st.integers(0, 50))
def test_near_fills_up_to_k_entries_or_all(steps: list[tuple[str, int]], k: int, seed: int) -> None:
    tree = HashtagTree(4, cold_start=5)
    held = played(steps, tree)
    found = [id for group in tree.near(vector(seed), k) for id in group]
    assert len(set(found)) == len(found) >= min(k, len(held))
    assert set(found) <= set(held)


def test_the_nearest_groups_come_first_and_no_more_than_needed() -> None:
    tree = HashtagTree(3, cold_start=1)
    corners = np.eye(3, D, dtype=np.float32)
    tree.add([f"e{i}" for i in range(30)], np.repeat(corners, 10, axis=0))
    tree.refit()
    towards = corners[1] + 0.3 * corners[2]
    assert [ids[0] for ids in tree.near(towards, 10)] == ["e10"]
    assert [ids[0] for ids in tree.near(towards, 11)] == ["e10", "e20"]
    assert [ids[0] for ids in tree.near(towards, 99)] == ["e10", "e20", "e0"]
    assert [len(ids) for ids in tree.near(towards, 5, margin=9.0)] == [30]


def test_empty_groups_are_removed_and_an_empty_tree_starts_cold() -> None:
    tree = HashtagTree(2, cold_start=2)
    tree.add(["a", "b"], np.eye(2, D, dtype=np.float32))
    tree.refit()
    tree.remove(["a", "unknown"])
    assert tree.groups == [["b"]]
    tree.remove(["b"])
    assert (tree.groups, len(tree), tree.near(vector(0), 3)) == ([], 0, [])
    assert tree.refit() is None
    tree.add(["c"], rows([1]))
    assert not tree.due()
    assert tree.groups == [["c"]]


def test_equal_entries_are_one_group() -> None:
    tree = HashtagTree(5, cold_start=1)
    tree.add([f"e{i}" for i in range(20)], np.repeat(rows([1]), 20, axis=0))
    done = tree.refit()
    assert done is not None
    assert (done.entries, done.groups, len(tree.centres)) == (20, 1, 1)


def test_a_refit_is_due_after_32_entries_of_a_new_topic() -> None:
    rng = np.random.default_rng(0)
    corner, other = np.eye(2, D, dtype=np.float32)
    noise = 0.05 * rng.standard_normal((280, D)).astype(np.float32)
    tree = HashtagTree(2, cold_start=40)
    tree.add([f"e{i}" for i in range(100)], corner + noise[:100])
    for start in (100, 190):  # counted again after each refit
        tree.refit()
        other = np.roll(other, 1)
        due = []
        for i in range(start, start + 48):
            tree.add([f"n{i}"], (other + noise[i])[None])
            due.append(tree.due())
        assert due[:32] == [*[False] * 31, True]
        tree.remove([f"n{i}" for i in range(start, start + 48)])
    assert len(tree) == 100


def test_only_the_adaptive_tree_is_fitted_again() -> None:
    near_corner = np.eye(4, D, dtype=np.float32)[np.arange(40) % 2]
    noise = 0.05 * np.random.default_rng(0).standard_normal((240, D)).astype(np.float32)
    fixed, adaptive = HashtagTree(2, adapt=False, cold_start=40), HashtagTree(2, cold_start=40)
    for tree in (fixed, adaptive):
        assert not tree.due()
        tree.add([f"e{i}" for i in range(40)], near_corner + noise[:40])
        assert tree.due()
        tree.refit()
        assert not tree.due()
        # More of the same, not yet twice as much:
        tree.add([f"s{i}" for i in range(35)], near_corner[:35] + noise[40:75])
        assert not tree.due()
        tree.remove([f"s{i}" for i in range(35)])
        # As many, of another topic:
        elsewhere = np.eye(4, D, dtype=np.float32)[[3] * 35]
        tree.add([f"d{i}" for i in range(35)], elsewhere + noise[75:110])
    assert adaptive.due()
    assert not fixed.due()
    done = adaptive.refit()
    assert done is not None
    assert done.spread_after < done.spread_before
    adaptive.add([f"g{i}" for i in range(80)], near_corner.repeat(2, 0) + noise[:80])
    assert adaptive.due()


def test_the_group_count_can_be_chosen_at_each_fit() -> None:
    seen: list[tuple[int, int]] = []

    def count(ids: Sequence[str], vectors: Vectors) -> int:
        seen.append((len(ids), len(vectors)))
        return 1 + len(ids) // 10

    tree = HashtagTree(count, cold_start=1)
    for size in (10, 30):
        tree.add([f"e{i}" for i in range(size)], rows(range(size)))
        tree.refit()
    assert seen == [(10, 10), (30, 30)]
    assert [refit.groups for refit in tree.refits] == [2, 4]


def test_a_new_topic_forms_a_group_if_the_count_is_chosen() -> None:
    corners = np.eye(4, D, dtype=np.float32)
    noise = 0.05 * np.random.default_rng(0).standard_normal((40, D)).astype(np.float32)
    fixed, counted, undivided, closed = (
        HashtagTree(2, cold_start=1, novel=2.0),
        HashtagTree(lambda ids, vectors: 2, cold_start=1, novel=2.0),
        HashtagTree(lambda ids, vectors: 1, cold_start=1, novel=2.0),
        HashtagTree(lambda ids, vectors: 2, cold_start=1),
    )
    for tree in (fixed, counted, undivided, closed):
        tree.add([f"e{i}" for i in range(40)], corners[np.arange(40) % 2] + noise)
        tree.refit()
        tree.add([f"n{i}" for i in range(10)], corners[[3] * 10])
    assert [len(tree.groups) for tree in (fixed, counted, undivided, closed)] == [2, 3, 1, 2]
    assert counted.groups[2] == [f"n{i}" for i in range(10)]


def test_a_far_entry_forms_no_group_if_one_group_is_best() -> None:
    tree = HashtagTree(lambda ids, vectors: 1, cold_start=1, novel=2.0)
    tree.add([f"e{i}" for i in range(30)], rows(range(30)))
    tree.refit()
    tree.add(["far"], 1000 * rows([31]))
    assert len(tree.groups) == 1


def test_outliers_do_not_exceed_the_group_limit() -> None:
    tree = HashtagTree(lambda ids, vectors: 2, cold_start=1, novel=2.0)
    tree.add(["a", "b", "c", "d"], np.eye(2, 200, dtype=np.float32)[[0, 0, 1, 1]])
    tree.refit()
    tree.add([f"stray{i}" for i in range(150)], 9 * np.eye(200, dtype=np.float32)[2:152])
    assert len(tree.groups) == MAX_GROUPS
    assert len(tree) == 154


def test_changes_during_a_refit_are_kept() -> None:
    fitting, go_on = threading.Event(), threading.Event()

    def slow(ids: Sequence[str], vectors: Vectors) -> int:
        fitting.set()
        assert go_on.wait(30)
        return 3

    tree = HashtagTree(slow, cold_start=1)
    tree.add([f"e{i}" for i in range(30)], rows(range(30)))
    background = threading.Thread(target=tree.refit)
    background.start()
    assert fitting.wait(30)
    assert tree.refit() is None  # one at a time
    tree.add([f"late{i}" for i in range(10)], rows(range(100, 110)))
    tree.remove(["e0", "e1"])
    tree.add(["e2"], rows([777]))
    assert tree.near(vector(3), 4)  # searches go on
    go_on.set()
    background.join(30)
    expected = {f"e{i}" for i in range(2, 30)} | {f"late{i}" for i in range(10)}
    members = tree.groups
    assert sorted(id for group in members for id in group) == sorted(expected)
    changed = {**{f"e{i}": i for i in range(30)}, **{f"late{i}": 100 + i for i in range(10)}}
    changed["e2"] = 777
    for group, centre in zip(members, tree.centres, strict=True):
        np.testing.assert_allclose(centre, rows([changed[id] for id in group]).mean(0), rtol=1e-5)


def test_nothing_is_lost_between_threads() -> None:
    tree = HashtagTree(3, cold_start=1)
    tree.add(["first"], rows([0]))
    stop = threading.Event()

    def refit() -> None:
        while not stop.is_set():
            tree.refit()

    def add(name: str) -> None:
        for i in range(60):
            tree.add([f"{name}{i}"], rows([i]))
            if i % 3 == 0:
                tree.remove([f"{name}{i}"])
            time.sleep(0)

    background = threading.Thread(target=refit)
    writers = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    background.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    stop.set()
    background.join(60)
    kept = {"first"} | {f"{name}{i}" for name in "abc" for i in range(60) if i % 3}
    assert sorted(id for group in tree.groups for id in group) == sorted(kept)


@given(seed=st.integers(0, 20), groups=st.integers(1, 8), n=st.integers(1, 30))
def test_kmeans_numbers_its_groups_without_gaps(seed: int, groups: int, n: int) -> None:
    vectors = rows(range(seed, seed + n))
    labels = kmeans(vectors, groups, seed=seed)
    assert set(labels.tolist()) == set(range(min(groups, n)))
    assert means(vectors, labels).shape == (min(groups, n), D)


@pytest.mark.parametrize(("groups", "cold_start"), [(0, 64), (2, 0)])
def test_an_invalid_tree_is_rejected(groups: int, cold_start: int) -> None:
    with pytest.raises(SettingError):
        HashtagTree(groups, cold_start=cold_start)


def test_a_refit_is_due_at_half_or_twice_the_entries_but_not_during_a_cold_start() -> None:
    tree = HashtagTree(2, cold_start=10)
    tree.add([f"e{i}" for i in range(20)], np.repeat(rows([1, 2]), 10, axis=0))
    tree.refit()
    tree.remove([f"e{i}" for i in range(9)])
    assert not tree.due()
    tree.remove(["e9"])
    assert tree.due()
    tree.remove(["e10"])
    assert not tree.due()  # nine entries
    tree.add([f"n{i}" for i in range(30)], np.repeat(rows([1, 2, 1]), 10, axis=0))
    assert len(tree) == 39 and not tree.due()
    tree.add(["last"], rows([1]))
    assert tree.due()


def test_a_tree_without_entries_is_not_refitted() -> None:
    tree = HashtagTree(2, cold_start=1)
    assert tree.refit() is None and not tree.refits and not tree.due()
    tree.add(["a"], rows([1]))
    assert tree.due()


def test_a_refit_reports_its_seconds() -> None:
    tree = HashtagTree(1, cold_start=1)
    tree.add(["a", "b"], rows([1, 2]))
    begun = time.perf_counter()
    done = tree.refit()
    assert done is not None and 0 < done.seconds <= time.perf_counter() - begun
    assert list(tree.refits) == [done]


def test_a_tree_emptied_during_its_refit_starts_cold() -> None:
    def empty(ids: Sequence[str], vectors: Vectors) -> int:
        tree.remove(ids)
        return 1

    tree = HashtagTree(empty, adapt=False, cold_start=2)
    tree.add(["a", "b"], rows([1, 2]))
    tree.refit()
    assert (len(tree), tree.groups) == (0, [])
    tree.add(["a"], rows([1]))
    assert not tree.due()
    tree.add(["b"], rows([2]))
    assert tree.due()
