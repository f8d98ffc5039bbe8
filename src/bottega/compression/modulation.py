"""Aggregated prompts to keys and values for every layer of the base model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bottega.kv_prefix import Geometry, KeyValues


class Modulation(nn.Module):
    """An MLP for each layer of the base model (P-Tuning v2; the paper's section "Modulating the
    baseMLLM"): one prompt becomes one place of the prefix, a key and a value for each of the
    layer's key-value heads.

    What an MLP says is measured in standard deviations around `centre`, both zero and one until
    `calibrate` has seen real keys and values: then training starts from a prefix that the model
    might have made itself, and a dimension that never varies stays as it is. With random keys a
    model whose heads rely on such dimensions is destroyed at the first step.
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
        self.second = nn.ModuleList(_silent(nn.Linear(width, size)) for _ in layers)
        self.register_buffer("centre", torch.zeros(geometry.layers, length, size))
        self.register_buffer("spread", torch.ones(geometry.layers, length, size))

    @property
    def length(self) -> int:
        return int(self.centre.shape[1])

    def forward(self, prompts: Tensor) -> KeyValues:
        """(batch, length, width)"""
        said = self.standardized(prompts) * self.spread[:, None] + self.centre[:, None]
        return self.split(said)

    def standardized(self, prompts: Tensor) -> Tensor:
        """(layers, batch, length, 2 * heads * dimensions), before scale and centre."""
        parts = zip(self.linear, self.first, self.second, strict=True)
        return torch.stack(
            [linear(prompts) + second(F.gelu(first(prompts))) for linear, first, second in parts]
        )

    def split(self, said: Tensor) -> KeyValues:
        heads = said.view(*said.shape[:-1], 2, self.geometry.kv_heads, self.geometry.head_dim)
        both = heads.permute(0, 3, 1, 4, 2, 5)  # layer, key or value, batch, head, place, dimension
        return KeyValues(tuple((layer[0], layer[1]) for layer in both))

    def join(self, real: KeyValues) -> Tensor:
        """The inverse of `split`, in the precision and at the place of what is trained: a base
        model has its own."""
        own = real.to(self.centre.device, self.centre.dtype)
        both = torch.stack([torch.stack(layer) for layer in own.layers])
        return both.permute(0, 2, 4, 1, 3, 5).flatten(3)

    @torch.no_grad()
    def calibrate(self, real: KeyValues, least: float = 1e-3) -> None:
        """By prefixes that the base model made itself, of the same length."""
        joined = self.join(real)
        self.centre.copy_(joined.mean(1))
        deviation = joined.std(1)
        self.spread.copy_(deviation.masked_fill(deviation <= least, 0.0))

    def distance(self, prompts: Tensor, real: KeyValues) -> Tensor:
        """Mean squared difference from a real prefix, in the spread of real ones."""
        apart = self.standardized(prompts) - self.standardize(real)
        return (apart.square() * (self.spread[:, None] > 0)).mean()

    def standardize(self, real: KeyValues) -> Tensor:
        spread = self.spread[:, None]
        known = spread > 0
        return torch.where(
            known, (self.join(real) - self.centre[:, None]) / torch.where(known, spread, 1.0), 0.0
        )

    @torch.no_grad()
    def fit(self, prompts: Tensor, real: KeyValues, ridge: float = 1.0) -> None:
        """The linear part by ridge regression of real keys and values on prompts: the closed-form
        start of training."""
        rows = prompts.flatten(0, 1).double()
        centre = rows.mean(0)
        rows = rows - centre
        wanted = self.standardize(real).flatten(1, 2).double()
        gram = rows.T @ rows + ridge * torch.eye(rows.shape[1]).to(rows)
        for linear, target in zip(self.linear, wanted, strict=True):
            assert isinstance(linear, nn.Linear)  # of a ModuleList only Modules are known
            offset = target.mean(0)
            weight = torch.linalg.solve(gram, rows.T @ (target - offset))
            linear.weight.copy_(weight.T)
            linear.bias.copy_(offset - centre @ weight)


def _silent(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
