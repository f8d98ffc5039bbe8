from __future__ import annotations

from collections.abc import Sequence

from bottega.retrieval.sources import ChangeFollower, StaticExamples
from tests.builders import ListPool, example


def test_static_examples_are_read_once() -> None:
    taken: list[tuple[list[str], list[str]]] = []

    def take(gone: Sequence[str], new: Sequence[str]) -> None:
        taken.append((sorted(gone), sorted(new)))

    pool = ListPool([example("a", 1, "x"), example("b", 2, "y")])
    follower = ChangeFollower(StaticExamples(pool).changes, take)
    assert [follower.follow() for _ in range(3)] == [2, 0, 0]
    assert taken == [(["x", "y"], ["x", "y"])]
    pool.examples["z"] = example("c", 3, "z")
    assert [follower.follow() for _ in range(2)] == [1, 0]
    assert taken[1:] == [(["z"], ["z"])]
