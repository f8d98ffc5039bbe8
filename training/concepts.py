"""Concepts that the vision model reads: the values that questions can ask for.

The projector's output has one slice per concept and one number per value, near 1 for the visible
value and near 0 for the others. The dot product of two images is the probability that they agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bottega.tasks.attributes import SIZES
from bottega.tasks.glyphs import NAMES
from bottega.tasks.rules import NUMBERS, SYMBOLS

SHARPNESS = 8.0  # logit scale of the cross-entropy: one-hot outputs have a low loss

PARTS = (*SIZES, SYMBOLS, NUMBERS, NUMBERS, len(NAMES))
STARTS = tuple(sum(PARTS[:i]) for i in range(len(PARTS)))
CONCEPTS = sum(PARTS)
SCENE = slice(0, len(SIZES))
ROW = slice(len(SIZES), len(SIZES) + 3)  # symbol, left, right
NAME = len(PARTS) - 1
DIGITS = 10  # read only by the master


def part(index: int) -> slice:
    return slice(STARTS[index], STARTS[index] + PARTS[index])


@dataclass
class ConceptLabels:
    """Labels of images: `parts` are indices into PARTS, `values` (n, len(parts))."""

    parts: range
    values: Tensor


def reading_loss(concepts: Tensor, read: ConceptLabels) -> Tensor:
    """Return cross-entropy plus squared distance to one-hot, averaged over the parts.

    `concepts` has shape (n, CONCEPTS).
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
    """Return the mean square of the concepts that are absent from these images."""
    return torch.stack([concepts[:, part(i)].square().sum(1).mean() for i in parts]).mean()


def agreement_loss(unit: Tensor, values: Tensor) -> Tensor:
    """Return the error of similarities: the similarity of two scenes should be their share of
    common values, at least 0.2.
    """
    share = (values[:, None] == values[None]).float().mean(-1)
    wrong = (unit @ unit.T - (0.2 + 0.8 * share)).square()
    others = ~torch.eye(len(unit), dtype=torch.bool)
    return wrong[others].mean()


@torch.no_grad()
def reading_accuracy(concepts: Tensor, read: ConceptLabels) -> list[float]:
    return [
        (concepts[:, part(index)].argmax(1) == read.values[:, column]).float().mean().item()
        for column, index in enumerate(read.parts)
    ]
