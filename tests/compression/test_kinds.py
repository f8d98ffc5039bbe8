from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.compression.hyper_model import image_groups, map_by_images
from bottega.types import Example, Query
from tests.builders import solid_image

BARE = [Example(Query(str(i)), "") for i in range(3)]
SEEN = [Example(Query(str(i), (solid_image(i),)), "") for i in range(3, 6)]


def test_only_the_kinds_that_are_there_are_named() -> None:
    assert image_groups([False, True, False]) == [[1], [0, 2]]
    assert image_groups([True, True]) == [[0, 1]]
    assert image_groups([]) == []


def test_passages_are_read_by_kind_and_put_together_in_their_order() -> None:
    batches = list[set[bool]]()

    def read(part: Sequence[Example]) -> Tensor:
        batches.append({bool(one.query.images) for one in part})
        return torch.tensor([[float(one.query.text)] for one in part])

    for told in ([*BARE, *SEEN], [SEEN[1], BARE[2], SEEN[0], BARE[0], BARE[1]], BARE, SEEN[:1]):
        read_in_order = map_by_images(told, read)
        assert read_in_order.flatten().tolist() == [float(one.query.text) for one in told]
    assert batches == [{True}, {False}, {True}, {False}, {False}, {True}]
