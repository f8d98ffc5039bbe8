"""What the eye learns to read beside likeness: the values that questions may ask for.

One slice of the projector's output for each thing read; inside a slice one number a value, near
1 for the value seen and near 0 for the others, so that a dot product of two pictures is the
probability that they agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bottega.tasks.attributes import SIZES
from bottega.tasks.glyphs import NAMES
from bottega.tasks.rules import NUMBERS, SYMBOLS

SHARPNESS = 8.0  # of the softmax whose cross-entropy is trained; a clean 1 among 0 satisfies it

PARTS = (*SIZES, SYMBOLS, NUMBERS, NUMBERS, len(NAMES))
STARTS = tuple(sum(PARTS[:i]) for i in range(len(PARTS)))
CONCEPTS = sum(PARTS)
SCENE = slice(0, len(SIZES))
ROW = slice(len(SIZES), len(SIZES) + 3)  # symbol, left, right
NAME = len(PARTS) - 1
DIGITS = 10  # what only the master reads


def part(index: int) -> slice:
    return slice(STARTS[index], STARTS[index] + PARTS[index])


@dataclass
class Read:
    """What pictures show: `parts` are indices into PARTS, `values` (n, len(parts))."""

    parts: range
    values: Tensor


def reading_loss(concepts: Tensor, read: Read) -> Tensor:
    """Cross-entropy and squared distance to one-hot, mean over the parts.

    `concepts` is (n, CONCEPTS).
    """
    total = torch.zeros(())
    for column, index in enumerate(read.parts):
        seen = concepts[:, part(index)]
        value = read.values[:, column]
        target = F.one_hot(value, PARTS[index]).to(seen.dtype)
        squared = (seen - target).square().sum(1).mean()
        total = total + F.cross_entropy(SHARPNESS * seen, value) + squared
    return total / len(read.parts)


def silence_loss(concepts: Tensor, parts: range) -> Tensor:
    """Pictures of anything else show none of these values."""
    return torch.stack([concepts[:, part(i)].square().sum(1).mean() for i in parts]).mean()


def agreement_loss(unit: Tensor, values: Tensor) -> Tensor:
    """The likeness of two scenes is the share of values they have in common, 0.2 at the least."""
    share = (values[:, None] == values[None]).float().mean(-1)
    wrong = (unit @ unit.T - (0.2 + 0.8 * share)).square()
    others = ~torch.eye(len(unit), dtype=torch.bool)
    return wrong[others].mean()


@torch.no_grad()
def reading_accuracy(concepts: Tensor, read: Read) -> list[float]:
    return [
        (concepts[:, part(index)].argmax(1) == read.values[:, column]).float().mean().item()
        for column, index in enumerate(read.parts)
    ]
