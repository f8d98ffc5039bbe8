from __future__ import annotations

import torch

from bottega.compression.shared_texts import SharedTexts

TEXTS = [[5, 6, 7], [5, 6, 7, 8], [5, 8], [9]]


def test_equal_beginnings_have_one_position() -> None:
    paths = [path.tolist() for path in SharedTexts(TEXTS, 0).paths]

    assert paths == [[0, 1, 2], [0, 1, 2, 3], [0, 4], [5]]


def test_equal_texts_differ_in_the_tokens_after_them() -> None:
    shared = SharedTexts([[5, 6], [5, 6]], 2)

    assert [path.tolist() for path in shared.paths] == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert shared.length == 6


def test_tokens_attend_to_their_own_text_up_to_themselves() -> None:
    shared = SharedTexts(TEXTS, 1)
    mask = shared.mask(torch.empty(0))[0, 0]

    for position in range(shared.length):
        seen = {
            one
            for path in map(torch.Tensor.tolist, shared.paths)
            if position in path
            for one in path[: path.index(position) + 1]
        }
        assert set(torch.nonzero(mask[position] == 0).flatten().tolist()) == seen
        assert (mask[position] == 0).sum() + (mask[position] < -1e30).sum() == shared.length


def test_joined_rows_are_found_at_their_positions() -> None:
    rows = [torch.tensor(text)[:, None] for text in TEXTS]
    shared = SharedTexts(TEXTS, 0)
    joined = shared.joined(rows)

    assert joined.flatten().tolist() == [5, 6, 7, 8, 8, 9]
    for path, row in zip(shared.paths, rows, strict=True):
        assert torch.equal(joined[path], row)
