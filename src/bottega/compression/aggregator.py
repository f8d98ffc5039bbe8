"""Cross-attention that merges compressed documents and a compressed query (eq. 3 and 4)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Initialization = Literal["similar", "random"]
SHARPNESS = 6.0  # initial scale of the attention by similarity


class CrossAttention(nn.Module):
    """Cross-attention block of eq. 3 and 4 (Vaswani et al. 2017): attention to a memory, then a
    feed-forward layer, both residual.

    With `start="similar"` the untrained block attends to similar prompts and adds their values;
    with `quiet` it adds nothing. With "random" the weights have torch's initialization. Inputs
    should have about unit variance in every dimension.
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
        """Return the updated prompts, of shape (batch, n, width).

        `prompts` have shape (batch, n, width) and `memory` (batch, m, width). `bias` (batch, m) is
        added to the attention logits, in nats.
        """
        query, key, value = (
            linear(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, rows in (
                (self.query, prompts),
                (self.key, memory),
                (self.value, memory),
            )
        )
        mask = None if bias is None else bias[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        prompts = prompts + self.out(attended.transpose(1, 2).flatten(2))
        output: Tensor = prompts + self.second(F.gelu(self.first(self.norm(prompts))))
        return output


FLOOR = -20.0  # nats; keeps half precision finite for a document with a very low score


class Aggregator(nn.Module):
    """Aggregator of compressed documents and a compressed query into one set of prompts.

    With `dcvq` (eq. 3) the documents' prompts first attend to the prompts of the image and of the
    question. In each of `blocks` cross-attentions the query's prompts then attend to the documents
    by similarity, and with `rgca` (eq. 4) also by retrieval score. Both switches are rows of the
    paper's Table 4.

    A score adds `strength` * log_softmax(score / temperature) nats to all prompts of its document.
    The paper does not specify how scores enter the attention; raw late-interaction scores would
    saturate it. One temperature serves a whole data set (`calibrate`) and is trained with the other
    weights: standardizing scores per query would exaggerate small differences.
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
            CrossAttention(width, heads=heads, start=start, quiet=index > 0)
            for index in range(blocks)
        )
        self.strength = nn.Parameter(torch.ones(()))
        self.log_temperature = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def calibrate(self, scores: Tensor) -> None:
        """Set the temperature so that a typical difference in `scores` (queries, documents) is 1
        nat."""
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
        """Return the aggregated prompts, of shape (batch, prompts, width).

        `documents` have shape (batch, documents, prompts, width); `image`, `question` and `both`
        have shape (batch, prompts, width); `scores` and `present` have shape (batch, documents). At
        least one document per query must be present.
        """
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
