"""Short names for seeded random draws: every picture comes from one explicit generator."""

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = Sequence[int]


def uniform(rng: torch.Generator, shape: Shape, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) * (high - low) + low


def normal(rng: torch.Generator, shape: Shape, scale: float = 1.0) -> Tensor:
    return torch.randn(tuple(shape), generator=rng) * scale


def integers(rng: torch.Generator, high: int, shape: Shape) -> Tensor:
    return torch.randint(0, high, tuple(shape), generator=rng)


def chance(rng: torch.Generator, shape: Shape, probability: float) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) < probability


def pick(rng: torch.Generator, weights: Sequence[float], count: int) -> Tensor:
    """`count` indices drawn in proportion to `weights`."""
    return torch.multinomial(torch.tensor(weights), count, replacement=True, generator=rng)


def sign(rng: torch.Generator, shape: Shape) -> Tensor:
    return torch.where(chance(rng, shape, 0.5), 1.0, -1.0)
