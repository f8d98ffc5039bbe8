"""Several texts as one sequence, in which equal beginnings occur once (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedTexts:
    """Texts of one batch, each followed by `extra` tokens of its own. `paths` hold the positions of
    each text's tokens in the sequence: a token occurs once for all texts that are equal up to it.
    """

    def __init__(self, texts: Sequence[Sequence[int]], extra: int) -> None:
        numbers: dict[tuple[int, int], int] = {}
        self.paths: list[Tensor] = []
        for index, text in enumerate(texts):
            path = [-1]
            for token in [*text, *[-1 - index] * extra]:
                path.append(numbers.setdefault((path[-1], token), len(numbers)))
            self.paths.append(torch.tensor(path[1:]))
        self.length = len(numbers)

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the rows (tokens, ...) of each text as one sequence (length, ...)."""
        joined = rows[0].new_empty(self.length, *rows[0].shape[1:])
        for path, row in zip(self.paths, rows, strict=True):
            joined[path] = row
        return joined

    def mask(self, like: Tensor) -> Tensor:
        """Return the attention mask (1, 1, length, length), which is added to the logits. A token
        attends to the tokens of its text up to itself."""
        lowest = torch.finfo(like.dtype).min
        mask = like.new_full((self.length, self.length), lowest)
        for path in self.paths:
            mask[path[:, None], path] = like.new_full((len(path), len(path)), lowest).triu(1)
        return mask[None, None]
