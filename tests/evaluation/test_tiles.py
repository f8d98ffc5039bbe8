from __future__ import annotations

from itertools import combinations

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmarks.built_in import AREAS, PER_CLASS, SIDE, Box
from bottega.evaluation.benchmarks.loading import load_benchmark


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_no_areas_of_a_photograph_overlap() -> None:
    for photograph in ("china", "flower"):
        areas = [
            area
            for name, *parts in AREAS.values()
            if name == photograph
            for part in parts
            for area in part
        ]
        assert len(areas) >= 4
        assert not [pair for pair in combinations(areas, 2) if overlap(*pair)]


def test_tiles_of_each_class_are_in_both_parts() -> None:
    data = load_benchmark("tiles", seed=0)
    assert set(data.labels) == set(AREAS)
    for part in (data.knowledge, data.items):
        counts = [sum(e.answer == label for e in part) for label in data.labels]
        assert 4 <= min(counts) <= max(counts) == PER_CLASS
    sizes = {(i.width, i.height) for e in data.knowledge for i in e.query.images}
    assert sizes == {(SIDE, SIDE)}
    assert len({e.query.images[0].sha256 for e in (*data.knowledge, *data.items)}) == len(
        data.knowledge
    ) + len(data.items)


def test_tiles_have_no_options() -> None:
    with pytest.raises(SettingError, match="tiles"):
        load_benchmark("tiles:side=64", seed=0)
