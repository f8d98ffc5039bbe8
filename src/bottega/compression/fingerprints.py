"""Which model a compressor was trained with."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

SAMPLES = 2048  # of each tensor: nobody waits for billions of weights
APART = 2_654_435_761  # a prime: steps by it meet every row and column, and no place twice
LARGEST = 65504.0  # of half precision
TOLERANCE = 0.01  # of a tensor's usual size; bfloat16 rounds by 0.004 at most
LEAST = 1e-6  # what half precision has no numbers for


def fingerprint(model: Any) -> str:
    """Tells a model by its architecture, and by two numbers of every tensor: the usual size of its
    numbers, and a sum of them with fixed factors, of the same scale. Both are of samples: a change
    of a few weights may go unseen. Compare with `same`: precision rounds these."""
    named = sorted(model.state_dict().items())
    shapes = [(name, tuple(one.shape)) for name, one in named]
    architecture = hashlib.sha256(f"{type(model).__name__}{shapes}".encode()).hexdigest()[:16]
    numbers = [number for _, one in named for number in _told(one)]
    return " ".join([architecture, *(f"{number:.4g}" for number in numbers)])


def same(one: str, other: str) -> bool:
    """Whether two fingerprints are of one model, in whatever precision. Raises `ValueError` for
    what is none."""
    (first, mine), (second, others) = _parsed(one), _parsed(other)
    if first != second or len(mine) != len(others):
        return False
    return all(
        abs(number - wanted) <= TOLERANCE * max(mine[place - place % 2], LEAST / TOLERANCE)
        for place, (number, wanted) in enumerate(zip(mine, others, strict=True))
    )


def check_fingerprint(told: object) -> str:
    """Raises `ValueError`."""
    if not isinstance(told, str) or not all(map(math.isfinite, _parsed(told)[1])):
        raise ValueError("it does not say which models it was trained with")
    return told


def _parsed(told: str) -> tuple[str, list[float]]:
    architecture, *numbers = told.split(" ")
    return architecture, [float(number) for number in numbers]


def _told(weight: Tensor) -> tuple[float, float]:
    few = _sampled(weight)
    if not len(few):
        return 0.0, 0.0
    size = few.square().mean().sqrt()
    factors = torch.arange(len(few), dtype=torch.float64).square().cos()
    mixed = (few * factors).sum() / math.sqrt(len(few) / 2)
    return size.item(), mixed.item()


def _sampled(weight: Tensor) -> Tensor:
    """What half precision has no numbers for, as masks have it, is the largest it has."""
    flat, count = weight.detach().flatten(), weight.numel()
    if count > SAMPLES:
        places = torch.arange(SAMPLES) * APART % count
        flat = flat[places.to(flat.device)]
    told = flat.float().cpu().double()
    return told.nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)
