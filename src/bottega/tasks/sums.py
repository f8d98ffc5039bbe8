"""Rows of a number, a symbol and a number, and the rules that a symbol may stand for."""

from collections.abc import Callable

import torch
from torch import Tensor

from bottega.tasks.draws import chance, integers, uniform
from bottega.tasks.figures import SYMBOLS, draw_rows
from bottega.tasks.nuisance import draw_styles, paint

NUMBERS = 10
HELD_OUT = 4  # one pair of numbers in so many is never drawn for training

RULES: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "differ": lambda a, b: abs(a - b),
    "larger": max,
    "smaller": min,
}


def is_held_out(left: Tensor, right: Tensor) -> Tensor:
    return (left * 3 + right) % HELD_OUT == 0


def draw_rows_values(rng: torch.Generator, n: int, held_out: bool | None = None) -> Tensor:
    """(n, 3) left number, symbol, right number; `held_out` chooses among the number pairs."""
    left, right = integers(rng, NUMBERS, (n,)), integers(rng, NUMBERS, (n,))
    symbol = integers(rng, SYMBOLS, (n,))
    if held_out is not None:
        # Moving the right number by 1 to 3 reaches any remainder of HELD_OUT.
        step = torch.where(
            torch.tensor(held_out), -(left * 3 + right), 1 + integers(rng, HELD_OUT - 1, (n,))
        )
        wrong = is_held_out(left, right) != held_out
        moved = right + step % HELD_OUT
        moved = torch.where(moved < NUMBERS, moved, moved - 2 * HELD_OUT)
        right = torch.where(wrong, moved, right)
    return torch.stack([left, symbol, right], dim=1)


def draw_sums(rng: torch.Generator, values: Tensor) -> Tensor:
    """(n, 3, 64, 64) in 0..1, one picture of every row of values (n, 3)."""
    style = draw_styles(rng, len(values))
    style.resolution = chance(rng, (len(values),), 0.3).long()  # full or half resolution
    style.boldness = uniform(rng, (len(values),), 0.9, 1.6)
    kinds = values + torch.tensor([0, NUMBERS, 0])
    return paint(rng, draw_rows(rng, kinds, style.boldness), style)
