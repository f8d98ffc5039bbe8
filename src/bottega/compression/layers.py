"""Trainable layers: cross-attention that aggregates compressed documents (eq. 3 and 4), and the
modulation of aggregated prompts to keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bottega.kv_prefix import Geometry, KeyValues

Initialization = Literal["similar", "random"]
SHARPNESS = 6.0  # initial scale of the attention by similarity
FLOOR = -20.0  # nats; keeps half precision finite for a document with a very low score


class CrossAttention(nn.Module):
    """Cross-attention block of eq. 3 and 4 (Vaswani et al. 2017): attention to a memory, then a
    feed-forward layer, both residual. With `start="similar"` the untrained block attends to similar
    prompts and adds their values; with `quiet` it adds nothing. With "random" the weights have
    torch's initialization. Inputs should have about unit variance in every dimension."""

    def __init__(
        self, width: int, *, heads: int = 1, start: Initialization = "similar", quiet: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if start == "similar":
            for linear in (self.query, self.key, self.value, self.out):
                nn.init.eye_(linear.weight)
                nn.init.zeros_(linear.bias)
            with torch.no_grad():
                self.query.weight.mul_(SHARPNESS)
            if quiet:
                nn.init.zeros_(self.out.weight)
            _zeroed(self.second)

    def forward(self, prompts: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the updated prompts, of shape (batch, n, width). `prompts` have shape (batch, n,
        width) and `memory` (batch, m, width). `bias` (batch, m) is added to the attention logits,
        in nats."""
        projections = (self.query, prompts), (self.key, memory), (self.value, memory)
        query, key, value = (
            linear(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, rows in projections
        )
        mask = None if bias is None else bias[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        prompts = prompts + self.out(attended.transpose(1, 2).flatten(2))
        output: Tensor = prompts + self.second(F.gelu(self.first(self.norm(prompts))))
        return output


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
        """Return the aggregated prompts, of shape (batch, prompts, width). `documents` have shape
        (batch, documents, prompts, width); `image`, `question` and `both` have shape (batch,
        prompts, width); `scores` and `present` have shape (batch, documents). At least one document
        per query must be present."""
        batch, count, prompts, width = documents.shape
        memory = documents.reshape(batch, count * prompts, width)
        if self.enhance is not None:
            memory = self.enhance(memory, torch.cat([image, question], dim=1))
        # All prompts of a document share its bias.
        bias = self._bias(scores, present).repeat_interleave(prompts, dim=1)
        for block in self.blocks:
            both = block(both, memory, bias.to(both.dtype))
        return both

    def _bias(self, scores: Tensor, present: Tensor) -> Tensor:
        # In fp32: half precision would round differences between large scores away.
        absent = torch.zeros_like(scores, dtype=torch.float32).masked_fill(~present, -torch.inf)
        if not self.rgca:
            return absent
        scaled = scores.float() / self.log_temperature.exp() + absent
        guided: Tensor = self.strength * scaled.log_softmax(-1)
        # The clamp turns -inf of absent documents into a number: add it again.
        return guided.clamp(min=FLOOR) + absent


class Modulation(nn.Module):
    """One MLP per layer of the base model (P-Tuning v2; the paper's section "Modulating the
    baseMLLM").

    Each prompt becomes one position of the prefix: a key and a value for each key-value head of the
    layer.

    The MLPs predict standard scores: the prefix is their output times `spread` plus `centre`. These
    are 1 and 0 until `calibrate` measures real keys and values. Training then starts from a prefix
    that the model could have produced, and a dimension that never varies stays constant. Random
    keys would break a model whose heads rely on such dimensions.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, geometry: Geometry, length: int) -> None:
        super().__init__()
        self.geometry = geometry
        size = 2 * geometry.kv_heads * geometry.head_dim
        layers = range(geometry.layers)
        self.linear = nn.ModuleList(nn.Linear(width, size) for _ in layers)
        self.first = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        self.second = nn.ModuleList(_zeroed(nn.Linear(width, size)) for _ in layers)
        self.register_buffer("centre", torch.zeros(geometry.layers, length, size))
        self.register_buffer("spread", torch.ones(geometry.layers, length, size))

    @property
    def length(self) -> int:
        return int(self.centre.shape[1])

    def forward(self, prompts: Tensor) -> KeyValues:
        """Return the prefix for `prompts` of shape (batch, length, width)."""
        return self.split(self.standardized(prompts) * self.spread[:, None] + self.centre[:, None])

    def standardized(self, prompts: Tensor) -> Tensor:
        """Return the MLPs' output (layers, batch, length, 2 * heads * head_dim), before scaling."""
        parts = zip(self.linear, self.first, self.second, strict=True)
        return torch.stack(
            [linear(prompts) + second(F.gelu(first(prompts))) for linear, first, second in parts]
        )

    def split(self, joined: Tensor) -> KeyValues:
        """Return the keys and values of (layers, batch, length, 2 * heads * head_dim)."""
        heads = joined.view(*joined.shape[:-1], 2, self.geometry.kv_heads, self.geometry.head_dim)
        both = heads.permute(0, 3, 1, 4, 2, 5)  # layer, key or value, batch, head, position, dim
        return KeyValues(tuple((layer[0], layer[1]) for layer in both))

    def join(self, real: KeyValues) -> Tensor:
        """Invert `split`, on the device and in the precision of the weights."""
        own = real.to(self.centre.device, self.centre.dtype)
        both = torch.stack([torch.stack(layer) for layer in own.layers])
        return both.permute(0, 2, 4, 1, 3, 5).flatten(3)

    @torch.no_grad()
    def calibrate(self, real: KeyValues, least: float = 1e-3) -> None:
        """Set centre and spread from prefixes of the base model itself, of the same length."""
        joined = self.join(real)
        self.centre.copy_(joined.mean(1))
        deviation = joined.std(1)
        # 0 marks a constant dimension: the MLPs cannot change it and the loss ignores it.
        self.spread.copy_(deviation.masked_fill(deviation <= least, 0.0))

    def distance(self, prompts: Tensor, real: KeyValues) -> Tensor:
        """Return the mean squared difference from a real prefix, in units of `spread`."""
        difference = self.standardized(prompts) - self.standardize(real)
        return (difference.square() * (self.spread[:, None] > 0)).mean()

    def standardize(self, real: KeyValues) -> Tensor:
        """Return the standard scores of a real prefix; 0 where a dimension does not vary."""
        spread, centred = self.spread[:, None], self.join(real) - self.centre[:, None]
        return (centred / spread).masked_fill(spread == 0, 0.0)

    @torch.no_grad()
    def fit(self, prompts: Tensor, real: KeyValues, ridge: float = 1.0) -> None:
        """Initialize the linear part by ridge regression of real keys and values on prompts."""
        # In double precision: the Gram matrix is nearly singular.
        rows = prompts.flatten(0, 1).double()
        centre = rows.mean(0)
        rows = rows - centre
        wanted = self.standardize(real).flatten(1, 2).double()
        gram = rows.T @ rows + ridge * torch.eye(rows.shape[1]).to(rows)
        for linear, target in zip(self.linear, wanted, strict=True):
            assert isinstance(linear, nn.Linear)  # ModuleList is typed as Modules
            offset = target.mean(0)
            weight = torch.linalg.solve(gram, rows.T @ (target - offset))
            linear.weight.copy_(weight.T)
            linear.bias.copy_(offset - centre @ weight)


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
