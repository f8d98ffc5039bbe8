from __future__ import annotations

from bottega.knowledge.search import ExampleCache
from tests.knowledge.doubles import image_example, text_example


def test_cache_keeps_the_latest_within_its_bytes() -> None:
    recent = ExampleCache(max_bytes=6500)
    recent.keep({key: text_example(f"{key}") for key in range(3)}, limit=9)
    recent.keep({3: text_example("3")}, limit=9)
    assert recent.keys() == {1, 2, 3}


def test_cache_counts_the_later_size_of_images() -> None:
    recent = ExampleCache(max_bytes=2 * 2048)
    recent.keep({1: image_example(1)}, limit=9)
    recent.keep({2: image_example(2)}, limit=9)
    assert recent.keys() == {2}


def test_cache_drops_the_oldest_when_it_exceeds_the_row_count() -> None:
    recent = ExampleCache()
    for key in range(100):
        recent.keep({key: text_example(f"{key}")}, limit=10)
        assert len(recent) == min(key + 1, 10)
    assert recent.keys() == set(range(90, 100))
