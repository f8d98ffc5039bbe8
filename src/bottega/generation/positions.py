"""Where tokens stand that follow on others. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Positions:
    """A token's position is one more than that of the token before; in models with
    `get_rope_index` (Qwen-VL) the tokens of an image have three, and the token behind it follows on
    the largest."""

    def __init__(self, model: Any, image_token: int) -> None:
        self._index = getattr(model.base_model, "get_rope_index", None)
        self._image_token = image_token

    def of(
        self, ids: torch.Tensor, mask: torch.Tensor, first: torch.Tensor, seen: Mapping[str, Any]
    ) -> torch.Tensor:
        """As the model's `forward` takes them, (rows, tokens) or (4, rows, tokens), for rows that
        are padded on the left and begin at `first`, (rows, 1). `seen` describes their images."""
        plain = first + (mask.cumsum(-1) - 1).clamp(min=0)
        if self._index is None:
            return plain
        if "image_grid_thw" not in seen:
            return plain.expand(4, -1, -1)
        spatial, _ = self._index(
            ids,
            mm_token_type_ids=(ids == self._image_token).int(),
            image_grid_thw=seen["image_grid_thw"],
            attention_mask=mask,
        )
        return torch.cat([plain[None], spatial + first])

    def after(self, positions: torch.Tensor) -> torch.Tensor:
        """(rows, tokens): the position of what follows on each token, whole images provided."""
        if positions.ndim == 2:
            return positions + 1
        return positions[1:].amax(dim=0).cummax(dim=-1).values + 1
