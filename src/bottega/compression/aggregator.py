"""Cross-attention between compressed prompts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Initialization = Literal["similar", "random"]
SHARPNESS = 6.0  # of attention by likeness, before any training


class CrossAttention(nn.Module):
    """The block of Vaswani et al. (2017) that eq. 3 and 4 speak of: attention to a memory, then a
    feed-forward layer, each added to what came in.

    `start="similar"`: before any training prompts attend to those that are like them and take
    over what they find, or with `quiet` nothing. "random" is what torch draws. Inputs are expected
    to have about unit variance in every dimension.
    """

    def __init__(
        self, width: int, *, heads: int = 1, start: Initialization = "similar", quiet: bool = False
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


FLOOR = -20.0  # nats: an excluded document must not blow up half precision


class Aggregator(nn.Module):
    """Compressed documents and the compressed image, question and both -> one set of prompts.

    `dcvq` (eq. 3): documents' prompts first attend to those of the image and of the question alone.
    `rgca` (eq. 4): in each of `blocks` cross-attentions the prompts of image and question attend to
    the documents, by likeness and by retrieval score; without it by likeness alone. Both switches
    are lines of the paper's Table 4.

    A score adds `strength` * log_softmax(score / temperature) nats to all prompts of its document.
    The paper does not say how scores enter; raw ones of late interaction would saturate. The
    temperature is one for a whole data set (`calibrate`) and is trained with the rest: scores that
    were standardised for each query would make much of small differences.
    """

    def __init__(
        self,
        width: int,
        *,
        blocks: int = 3,
        heads: int = 1,
        dcvq: bool = True,
        rgca: bool = True,
        start: Initialization = "similar",
    ) -> None:
        super().__init__()
        self.rgca = rgca
        self.enhance = CrossAttention(width, heads=heads, start=start, quiet=True) if dcvq else None
        self.blocks = nn.ModuleList(
            CrossAttention(width, heads=heads, start=start, quiet=place > 0)
            for place in range(blocks)
        )
        self.strength = nn.Parameter(torch.ones(()))
        self.log_temperature = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def calibrate(self, scores: Tensor) -> None:
        """Scores of a whole data set, (queries, documents): a usual difference is one nat."""
        spread = (scores - scores.mean(-1, keepdim=True)).square().mean().sqrt()
        self.log_temperature.copy_(spread.clamp(min=1e-6).log())

    def forward(
        self,
        documents: Tensor,
        image: Tensor,
        question: Tensor,
        both: Tensor,
        scores: Tensor,
        present: Tensor,
    ) -> Tensor:
        """`documents` (batch, documents, prompts, width), the next three (batch, prompts, width),
        `scores` and `present` (batch, documents); one document at least has to be present."""
        batch, count, prompts, width = documents.shape
        memory = documents.reshape(batch, count * prompts, width)
        if self.enhance is not None:
            memory = self.enhance(memory, torch.cat([image, question], dim=1))
        bias = self._bias(scores, present).repeat_interleave(prompts, dim=1)
        for block in self.blocks:
            both = block(both, memory, bias.to(both.dtype))
        return both

    def _bias(self, scores: Tensor, present: Tensor) -> Tensor:
        absent = torch.zeros_like(scores, dtype=torch.float32).masked_fill(~present, -torch.inf)
        if not self.rgca:
            return absent
        scaled = scores.float() / self.log_temperature.exp() + absent
        guided: Tensor = self.strength * scaled.log_softmax(-1)
        return guided.clamp(min=FLOOR) + absent
