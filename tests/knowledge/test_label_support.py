"""Labels that the other examples do not support."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase
from bottega.types import Example, Query
from tests.knowledge.test_metric import examples, noisy_classes, open_base


@pytest.mark.parametrize("seed", range(3))
def test_planted_wrong_labels_come_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(4), 40)
    drawn = rng.normal(size=(4, 20))[classes] + rng.normal(size=(160, 20)) * 0.7
    vectors = drawn.astype(np.float32)
    wrong = rng.permutation(len(classes))[:16]
    labels = classes.copy()
    labels[wrong] = (labels[wrong] + 1) % 4
    with open_base(":memory:", vectors) as base:
        base.add(examples(labels))
        found = base.label_supports()
        position = {id: int(one.query.text) for id, one in zip(base.ids(), base, strict=True)}
    first = {position[one.id] for one in found[:16]}
    assert len(first & set(wrong.tolist())) >= 14
    assert [one.support for one in found] == sorted(one.support for one in found)
    likely = [one.likely == (f"class {classes[position[one.id]]}",) for one in found[:16]]
    assert sum(likely) >= 14


def test_equal_vectors_and_single_labels() -> None:
    with open_base(":memory:", np.ones((6, 3), np.float32)) as base:
        base.add([Example(Query("0"), "one"), Example(Query("1"), "two")])
        assert base.label_supports() == []  # nothing could support them
    with open_base(":memory:", np.ones((2, 3), np.float32)) as base:
        base.add([Example(Query("0"), "one"), Example(Query("1"), "one")])
        with pytest.raises(SettingError, match="fewer than two"):
            base.label_supports()


def test_it_reads_a_file_without_its_embedder(tmp_path: Path) -> None:
    vectors, classes = noisy_classes()
    path = tmp_path / "k.db"
    with open_base(path, vectors) as base:
        base.add(examples(classes))
        found = base.label_supports()
    with KnowledgeBase.open(path, None) as base:
        assert base.label_supports() == found
