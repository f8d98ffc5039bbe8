"""What the documents have to say to one image and question."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bottega.compression.attention import CrossAttention, Start

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
        start: Start = "similar",
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
