"""Rules: what does a symbol do to the numbers beside it? Each episode gives symbols new rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.tasks.figures import SYMBOLS, draw_rows
from bottega.tasks.nuisance import draw_styles, paint
from bottega.tasks.strokes import chance, integers, uniform
from bottega.tasks.task import (
    Seeds,
    Task,
    check_knob,
    check_pictures,
    entry,
    images,
    in_episodes,
    question,
)
from bottega.types import Example

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


@dataclass(frozen=True)
class Rules:
    """Every episode gives `symbols` of the four symbols a rule each, shows `shown` rows with their
    results and asks `asked` others, whose pairs of numbers are never shown or trained on.
    """

    symbols: int = 3
    shown: int = 24
    asked: int = 20
    episodes: int = 25

    def __post_init__(self) -> None:
        check_knob("symbols", self.symbols, 1, min(SYMBOLS, len(RULES)))
        check_knob("shown", self.shown, self.symbols, 200)
        check_knob("asked", self.asked, 1, 200)
        check_knob("episodes", self.episodes, 1, 500)
        check_pictures(self.episodes * (self.shown + self.asked), "episodes, shown or asked")

    def draw(self, seed: int) -> Task:
        seeds = Seeds(seed)
        return in_episodes(self._episode(seeds, number) for number in range(self.episodes))

    def _episode(self, seeds: Seeds, episode: int) -> tuple[list[Example], list[Example]]:
        chosen = seeds.words.sample(range(SYMBOLS), self.symbols)
        rules = dict(zip(chosen, seeds.words.sample(list(RULES), self.symbols), strict=True))
        return (
            _rows(seeds, f"{episode}-shown", self.shown, rules, held_out=False),
            _rows(seeds, f"{episode}-asked", self.asked, rules, held_out=True),
        )


def _rows(
    seeds: Seeds, part: str, count: int, rules: Mapping[int, str], *, held_out: bool
) -> list[Example]:
    rng = seeds.words
    values = draw_rows_values(seeds.pictures, count, held_out)
    # Dealt, not drawn: no symbol may be missing from what is shown.
    dealt = [list(rules)[i % len(rules)] for i in range(count)]
    values[:, 1] = torch.tensor(rng.sample(dealt, count))
    pictures = images(draw_sums(seeds.pictures, values))
    examples = []
    for place, (picture, row) in enumerate(zip(pictures, values.tolist(), strict=True)):
        left, symbol, right = row
        tags = {"episode": part.partition("-")[0], "topic": "symbol", "rule": rules[symbol]}
        example = entry(f"rules-{part}-{place}", question(rng, "symbol"), "", picture, tags=tags)
        examples.append(_worked(example, rules[symbol], left, right))
    return examples


def misapplied(example: Example, rng: random.Random) -> Example | None:
    """The row worked out by another rule with another result: wrong, and consistent with itself.

    None where all rules agree, as for two zeros.
    """
    _, left, right = str(example.rationale).split()
    results = {rule: str(work(int(left), int(right))) for rule, work in RULES.items()}
    others = [rule for rule, result in results.items() if result != example.answer]
    return _worked(example, rng.choice(others), int(left), int(right)) if others else None


def _worked(example: Example, rule: str, left: int, right: int) -> Example:
    return replace(
        example, answer=str(RULES[rule](left, right)), rationale=f"{rule} {left} {right}"
    )
