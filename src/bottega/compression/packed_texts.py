"""Several texts packed into one sequence, in which common prefixes occur once (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PackedTexts:
    """Sequence of several texts, each followed by `extra` tokens that no other text shares.
    `paths[i]` holds the positions of the tokens of text i in the sequence. Texts with a common
    prefix share its positions, as in a trie."""

    def __init__(self, texts: Sequence[Sequence[int]], extra: int) -> None:
        # Positions by the position of the previous token in the text (-1 for none) and the token.
        positions: dict[tuple[int, int], int] = {}
        self.paths: list[Tensor] = []
        for index, text in enumerate(texts):
            path = [-1]
            # Extra tokens have a different id in each text.
            for token in [*text, *[-1 - index] * extra]:
                path.append(positions.setdefault((path[-1], token), len(positions)))
            self.paths.append(torch.tensor(path[1:], dtype=torch.int64))
        self.length = len(positions)

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """Return one sequence (length, ...) of the rows (tokens, ...) of all texts."""
        packed = rows[0].new_empty(self.length, *rows[0].shape[1:])
        for path, row in zip(self.paths, rows, strict=True):
            packed[path] = row
        return packed

    def attention_mask(self, like: Tensor) -> Tensor:
        """Return the additive attention mask (1, 1, length, length) with the dtype and device of
        `like`. A token attends to itself and to the tokens before it in its text."""
        lowest = torch.finfo(like.dtype).min
        mask = like.new_full((self.length, self.length), lowest)
        for path in self.paths:
            mask[path[:, None], path] = like.new_full((len(path), len(path)), lowest).triu(1)
        return mask[None, None]
