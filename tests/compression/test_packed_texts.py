from __future__ import annotations

import torch

from bottega.compression.hyper_model import PackedTexts

TEXTS = [[5, 6, 7], [5, 6, 7, 8], [5, 8], [9]]


def test_common_prefixes_share_positions() -> None:
    paths = [path.tolist() for path in PackedTexts(TEXTS, 0).paths]

    assert paths == [[0, 1, 2], [0, 1, 2, 3], [0, 4], [5]]


def test_extra_tokens_of_equal_texts_have_separate_positions() -> None:
    packed = PackedTexts([[5, 6], [5, 6]], 2)

    assert [path.tolist() for path in packed.paths] == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert packed.length == 6


def test_tokens_attend_to_their_own_text_up_to_themselves() -> None:
    packed = PackedTexts(TEXTS, 1)
    mask = packed.attention_mask(torch.empty(0))[0, 0]

    for position in range(packed.length):
        attended = {
            one
            for path in map(torch.Tensor.tolist, packed.paths)
            if position in path
            for one in path[: path.index(position) + 1]
        }
        assert set(torch.nonzero(mask[position] == 0).flatten().tolist()) == attended
        assert (mask[position] == 0).sum() + (mask[position] < -1e30).sum() == packed.length


def test_packed_rows_are_at_the_positions_of_their_tokens() -> None:
    rows = [torch.tensor(text)[:, None] for text in TEXTS]
    packed = PackedTexts(TEXTS, 0)
    sequence = packed.pack(rows)

    assert sequence.flatten().tolist() == [5, 6, 7, 8, 8, 9]
    for path, row in zip(packed.paths, rows, strict=True):
        assert torch.equal(sequence[path], row)


def test_text_without_tokens_has_no_positions() -> None:
    packed = PackedTexts([[], [5]], 0)

    assert [path.tolist() for path in packed.paths] == [[], [0]]
    assert packed.attention_mask(torch.empty(0)).tolist() == [[[[0.0]]]]
