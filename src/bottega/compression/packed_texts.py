"""Several texts packed into one sequence, in which common prefixes occur once (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PackedTexts:
    """Sequence of several texts, each followed by `extra` tokens that no other text shares. `paths`
    holds the position in the sequence of each token of each text. Texts with a common prefix share
    its positions, as in a trie.
    """

    def __init__(self, texts: Sequence[Sequence[int]], extra: int) -> None:
        # The position of each token, by the position of its parent (-1 for none) and its id.
        positions: dict[tuple[int, int], int] = {}
        self.paths: list[Tensor] = []
        for index, text in enumerate(texts):
            path = [-1]
            for token in [*text, *[-1 - index] * extra]:  # extra tokens have ids of their own
                path.append(positions.setdefault((path[-1], token), len(positions)))
            self.paths.append(torch.tensor(path[1:], dtype=torch.int64))
        self.length = len(positions)

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """Pack the rows (tokens, ...) of all texts into one sequence (length, ...)."""
        packed = rows[0].new_empty(self.length, *rows[0].shape[1:])
        for path, row in zip(self.paths, rows, strict=True):
            packed[path] = row
        return packed

    def attention_mask(self, like: Tensor) -> Tensor:
        """Return the additive attention mask (1, 1, length, length) in the dtype of `like`. A token
        attends to the tokens of its text up to itself."""
        lowest = torch.finfo(like.dtype).min
        mask = like.new_full((self.length, self.length), lowest)
        for path in self.paths:
            mask[path[:, None], path] = like.new_full((len(path), len(path)), lowest).triu(1)
        return mask[None, None]
