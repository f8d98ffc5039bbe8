"""Hand-written weights: the attention of a layer, and the gated units of its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training import architecture as a
from training.rotary import Rotary

KEY_BIAS = 16.0  # of the pairs that carry distances: small enough amplitudes for half precision

NEAREST, PREVIOUS, RECENT, RECENT_BEFORE, ASKING = range(5)  # heads of layer 0
MATCH, SHOWN_BEFORE = range(2)  # heads of layer 1; the others are free

TEXT_SIZE = 3.0  # of the constant of all text: it keeps the norms of text positions equal
FLAG = 0.5  # of a flag of a special word
TEXT_NORM = (TEXT_SIZE**2 + 1) ** 0.5  # of token embeddings: the constant and the code
SEEN_INPUT = 0.1  # size of the concepts beside the image of norm 1 in the output of the projector
OPENER_NORM = (2.0 - a.SHORT_CODE / a.CODE) ** 0.5  # <user>, <system>, <bos>: only part of a code
KEY_COPY, SEEN_COPY, TOKEN_COPY, TOPIC_COPY = 1.0, 0.25, 0.5, 0.5
# Attention divides by the norms of positions, and the norm of a context depends on how much the
# codes of its words overlap. At 0.5 the norms of two labels differed by up to 1 %, depending on the
# words of the question. That is 1.6 nats of a score of about 160, more than the difference between
# ten retrieved photographs. The norm depends on the square of this size; the match compensates.
CONTEXT_COPY = 0.125
RULE_GAIN = 4.0  # words of rules fade over six tokens and must still be read then
CONTEXT_NORM = 0.49  # norm of a mixture of different unit codes under `context_profile`
# Norms of text positions: before layer 0's MLP, and in layer 1 before and after its attention.
NORM_0, NORM_1, NORM_WRITTEN = 3.36, 3.30, 6.87

Weights = Mapping[int, float]


def dims(part: slice | int) -> Tensor:
    return torch.arange(part.start, part.stop) if isinstance(part, slice) else torch.tensor([part])


class Attention:
    """Attention of one layer: keys and values that all heads share."""

    def __init__(self, layer: Any, rotary: Rotary = a.ROTARY) -> None:
        attention = layer.self_attn
        self.rotary = rotary
        self.k, self.k_bias = attention.k_proj.weight, attention.k_proj.bias
        self.v = attention.v_proj.weight
        self.attention, self.width = attention, attention.k_proj.in_features
        self.root = rotary.head_dim**0.5  # attention divides scores by it

    def offer_distances(self, pairs: int) -> None:
        self.k_bias[:pairs] = KEY_BIAS

    def offer_flag(self, slot: int, part: slice | int) -> None:
        """Let heads prefer keys by the sum of `part` (see `Head.prefer_flag`)."""
        self.k[slot, dims(part)] = 1.0

    def offer_values(self, start: int, part: slice | int, gain: float = 1.0) -> Tensor:
        """Let heads copy `part` from the returned slots."""
        source = dims(part)
        slots = torch.arange(start, start + len(source))
        self.v[slots, source] = gain
        return slots

    def head(self, index: int) -> Head:
        return Head(self, index)


class Head:
    """One attention head: its queries, and the destination of its values."""

    def __init__(self, shared: Attention, index: int) -> None:
        size = shared.rotary.head_dim
        rows = slice(index * size, (index + 1) * size)
        attention = shared.attention
        self.shared, self.root = shared, shared.root
        self.q, self.q_bias = attention.q_proj.weight[rows], attention.q_proj.bias[rows]
        self.o = attention.o_proj.weight[:, rows]

    def prefer_distance(self, profile: Tensor) -> None:
        """Add a score that depends only on distance."""
        pair = torch.arange(len(profile))
        self.q_bias[pair] = (profile[:, 0] * self.root / KEY_BIAS).float()
        self.q_bias[pair + self.shared.rotary.pairs] = -(
            profile[:, 1] * self.root / KEY_BIAS
        ).float()

    def prefer_flag(self, slot: int, nats: float, size: float) -> None:
        """Add `nats` for keys whose normalized input has `size` in the flag offered at `slot`."""
        self.q_bias[slot] = nats * self.root / size

    def seek(self, flag: int, slot: int, nats: float, size: float) -> None:
        """Prefer a flag as in `prefer_flag`, for queries with the flag `flag`; `size` is the
        product of both.
        """
        self.q[slot, flag] = nats * self.root / size

    def match(self, query: slice, key: slice, used: int, nats: float, size: float) -> int:
        """Add `nats` where the query's `query` equals the key's `key`; `size` is the product of
        norms.

        Uses slow slots after the `used` ones and returns the new number of used slots.
        """
        slots = self.shared.rotary.slow_slots(used, len(dims(query)))
        weight = (nats * self.root / size) ** 0.5
        self.q[slots, dims(query)] = weight
        self.shared.k[slots, dims(key)] = weight
        return used + len(slots)

    def copy(self, slots: Tensor, target: slice | int, gain: float) -> None:
        self.o[dims(target), slots] = gain


class Units:
    """Gated units of a layer's MLP: down * silu(gate) * up.

    `norm` is that of the relevant positions, by which the layer norm divides.
    """

    def __init__(self, mlp: Any, norm: float) -> None:
        self.gate, self.up = mlp.gate_proj.weight, mlp.up_proj.weight
        self.down = mlp.down_proj.weight
        self.scale, self.used = self.gate.shape[1] ** 0.5 / norm, 0

    def add(
        self,
        gate: Weights,
        up: Weights,
        opened: float,
        write: Tensor,
        into: slice | int,
        sharpness: float,
    ) -> None:
        """Add a unit that writes `write` when its gate's sum is `opened` and its up's sum is 1."""
        unit = self.used
        if unit >= len(self.gate):
            raise ValueError("the MLP has no unit left")
        self.used += 1
        for weight, part, factor in ((self.gate, gate, sharpness), (self.up, up, 1.0)):
            weight[unit] = 0.0
            for dim, value in part.items():
                weight[unit, dim] = value * factor
        signal = F.silu(torch.tensor(opened * sharpness * self.scale)).item() * self.scale
        self.down[:, unit] = 0.0
        self.down[dims(into), unit] = write / signal

    def add_step(
        self,
        gate: Weights,
        up: Weights,
        half: float,
        write: Tensor,
        into: slice | int,
        sharpness: float,
    ) -> None:
        """Add a unit that writes `write` where the gate's sum is above `half`, nothing below
        -`half`, and a share between.
        """
        for way in (1.0, -1.0):
            shifted = dict(gate)
            shifted[a.TEXT] = shifted.get(a.TEXT, 0.0) + way * half / TEXT_SIZE
            self.add(shifted, up, 2 * half, way * write, into, sharpness)
