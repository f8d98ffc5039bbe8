from __future__ import annotations

from bottega.knowledge.change_log import ExampleCache
from tests.knowledge.doubles import asked, shown


def test_the_latest_stay_within_the_bytes() -> None:
    recent = ExampleCache(most_bytes=6500)
    recent.keep({key: asked(f"{key}") for key in range(3)}, most=9)
    recent.keep({3: asked("3")}, most=9)
    assert recent.among(range(4)).keys() == {1, 2, 3}


def test_images_count_for_what_they_may_come_to_hold() -> None:
    recent = ExampleCache(most_bytes=2 * 2048)
    recent.keep({1: shown(1)}, most=9)
    recent.keep({2: shown(2)}, most=9)
    assert recent.among([1, 2]).keys() == {2}


def test_more_than_there_are_were_deleted_and_are_let_go() -> None:
    recent = ExampleCache()
    for key in range(100):
        recent.keep({key: asked(f"{key}")}, most=10)
        assert len(recent) <= 10
    assert recent.among(range(100)).keys() == set(range(90, 100))
