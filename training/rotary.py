"""Attention by distance: target profiles as sums of rotations of the rotary pairs.

Scores are in nats: differences of log attention weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_POSITIONS = 8192
RESERVED = 8  # of the slowest pairs: they carry flags, never distances


@dataclass(frozen=True)
class Rotary:
    """Rotary pairs of a head: dimensions i and i + `pairs` turn together.

    Most pairs must hardly turn over a prompt of thousands of tokens, because they carry content:
    `theta` is large.
    """

    head_dim: int
    theta: float

    @property
    def pairs(self) -> int:
        return self.head_dim // 2

    def frequencies(self) -> Tensor:
        exponent = -torch.arange(self.pairs, dtype=torch.float64) / self.pairs
        frequency: Tensor = torch.exp(exponent * math.log(self.theta))
        return frequency

    def slow_slots(self, used: int, count: int) -> Tensor:
        """Return `count` dimensions of the slowest pairs, after the `used` first ones."""
        pair = self.pairs - 1 - (torch.arange(used, used + count) // 2)
        return pair + (torch.arange(used, used + count) % 2) * self.pairs

    def fit_profile(self, distance: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return (pairs, 2) cosine and sine amplitudes that approximate target(d)."""
        pairs = self.pairs - RESERVED
        angle = distance[:, None].double() * self.frequencies()[:pairs]
        basis = torch.cat([angle.cos(), angle.sin()], dim=1) * weight[:, None]
        # The ridge keeps amplitudes small enough for half precision storage.
        gram = basis.T @ basis + 1e-6 * len(distance) * torch.eye(2 * pairs, dtype=torch.float64)
        amplitude: Tensor = torch.linalg.solve(gram, basis.T @ (target.double() * weight))
        return amplitude.view(2, pairs).transpose(0, 1)

    def recency_profile(self) -> Tensor:
        """Return a profile of 8 nats per token nearby, flatter beyond 150 tokens, decreasing up to
        MAX_POSITIONS.
        """
        distance = _distances(0)
        target = -1200 * torch.log1p(distance / 150)
        return self.fit_profile(distance, target - target.mean(), 1 / (1 + distance / 150))

    def context_profile(self) -> Tensor:
        """Return a profile that fades over about six tokens, and is low at distance -1.

        Shifted by one position, -1 becomes a position's own token. The context must exclude it,
        because it is the token to predict.
        """
        distance = _distances(-1)
        target = -0.6 * (distance - 1)
        beyond = -5.4 - 30 * torch.log1p((distance - 10).clamp(min=0) / 30)
        target = torch.where(distance > 10, beyond, target)
        target[0], target[1] = -6.0, -1.2
        weight = torch.where(distance < 12, 20.0, 1 / (1 + distance / 50))
        weight[0] = 8.0
        return self.fit_profile(distance, target, weight)

    def topic_profile(self) -> Tensor:
        """Return a profile of 0.3 nats per token: two topic words of one sentence share the
        attention, those of the previous sentence do not.
        """
        distance = _distances(0)
        target = -18 - 30 * torch.log1p((distance - 60).clamp(min=0) / 100)
        target = torch.where(distance > 60, target, -0.3 * distance)
        return self.fit_profile(distance, target - target.mean(), 1 / (1 + distance / 30))

    def shift(self, profile: Tensor, positions: int) -> Tensor:
        """Return the profile moved back by `positions`: each pair's phase moves by its
        frequency."""
        angle = positions * self.frequencies()[: len(profile)]
        cos, sin = profile.unbind(dim=1)
        return torch.stack(
            [cos * angle.cos() - sin * angle.sin(), cos * angle.sin() + sin * angle.cos()], dim=1
        )


def peak_profile(pairs: int = 20, nats: float = 20.0) -> Tensor:
    """Return a peak at distance 0, where all fast pairs agree."""
    return nats * torch.stack([torch.ones(pairs), torch.zeros(pairs)], dim=1).double()


def _distances(first: float) -> Tensor:
    far = torch.logspace(2.4, math.log10(MAX_POSITIONS), 600).round()
    return torch.cat([torch.arange(first, 250.0), far]).double()
