"""Rows of tree nodes as tensors."""

from __future__ import annotations

from bottega.generation.token_tree import PackedRows


def test_rows_without_a_query_are_left_out() -> None:
    """Samples of one long prompt would otherwise each take a mask of its length squared."""
    path = list(range(50))
    packed = PackedRows([(path, []), (path, [[50, 51]]), (path, [])])
    new = packed.from_node(0)
    assert new.nodes.tolist() == list(range(52))
    assert new.depths.tolist() == [*range(50), 50, 51]
    # The first row has the prompt, the second its draft; the third has nothing new.
    assert new.mask.shape == (2, 1, 50, 52)
    assert new.mask[0, 0, 49].sum() == 50 and new.mask[1, 0, 1].sum() == 52
    assert packed.requested.mask.shape[0] == 3
