"""Modulation: aggregated prompts to keys and values for each layer of the base model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bottega.kv_prefix import Geometry, KeyValues


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
        """Invert `split`, on the device and in the precision of the trained weights."""
        own = real.to(self.centre.device, self.centre.dtype)
        both = torch.stack([torch.stack(layer) for layer in own.layers])
        return both.permute(0, 2, 4, 1, 3, 5).flatten(3)

    @torch.no_grad()
    def calibrate(self, real: KeyValues, least: float = 1e-3) -> None:
        """Set centre and spread from prefixes of the base model itself, of the same length."""
        joined = self.join(real)
        self.centre.copy_(joined.mean(1))
        deviation = joined.std(1)
        self.spread.copy_(deviation.masked_fill(deviation <= least, 0.0))

    def distance(self, prompts: Tensor, real: KeyValues) -> Tensor:
        """Return the mean squared difference from a real prefix, in units of `spread`."""
        difference = self.standardized(prompts) - self.standardize(real)
        return (difference.square() * (self.spread[:, None] > 0)).mean()

    def standardize(self, real: KeyValues) -> Tensor:
        """Return the standard scores of a real prefix; 0 where a dimension does not vary."""
        spread = self.spread[:, None]
        varies = spread > 0
        return torch.where(
            varies, (self.join(real) - self.centre[:, None]) / torch.where(varies, spread, 1.0), 0.0
        )

    @torch.no_grad()
    def fit(self, prompts: Tensor, real: KeyValues, ridge: float = 1.0) -> None:
        """Initialize the linear part by ridge regression of real keys and values on prompts."""
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
