"""Cross-attention between compressed prompts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Start = Literal["similar", "random"]
SHARPNESS = 6.0  # of attention by likeness, before any training


class CrossAttention(nn.Module):
    """The block of Vaswani et al. (2017) that eq. 3 and 4 speak of: attention to a memory, then a
    feed-forward layer, each added to what came in.

    `start="similar"`: before any training prompts attend to those that are like them and take
    over what they find, or with `quiet` nothing. "random" is what torch draws. Inputs are expected
    to have about unit variance in every dimension.
    """

    def __init__(
        self, width: int, *, heads: int = 1, start: Start = "similar", quiet: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if start == "similar":
            self._start_similar(quiet)

    @torch.no_grad()
    def _start_similar(self, quiet: bool) -> None:
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.query.weight.mul_(SHARPNESS)
        if quiet:
            nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, prompts: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """(batch, n, width), (batch, m, width), nats to add: (batch, m) -> (batch, n, width)."""
        query, key, value = (
            linear(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, rows in (
                (self.query, prompts),
                (self.key, memory),
                (self.value, memory),
            )
        )
        mask = None if bias is None else bias[:, None, None, :]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        prompts = prompts + self.out(found.transpose(1, 2).flatten(2))
        thought: Tensor = prompts + self.second(F.gelu(self.first(self.norm(prompts))))
        return thought
