"""Attributes: what is asked decides which of a scene's five values is the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.tasks.handwriting import integers, normal, uniform
from bottega.tasks.task import (
    Seeds,
    Task,
    check_knob,
    check_word,
    entry,
    images,
    invented_words,
    question,
)
from bottega.types import Example

SIZE = 64
VALUES: dict[str, tuple[str, ...]] = {
    "shape": ("disc", "square", "triangle", "cross", "ring", "diamond", "bar", "pillar"),
    "colour": ("red", "orange", "yellow", "green", "cyan", "blue", "violet", "pink"),
    "texture": ("plain", "upright", "level", "slanted", "chequered", "dotted"),
    "count": ("one", "two", "three", "four"),
    "place": ("northwest", "northeast", "southwest", "southeast"),
}
ATTRIBUTES = tuple(VALUES)
SIZES = tuple(len(words) for words in VALUES.values())
HELD_OUT = 8  # one shape-colour pair in so many is never drawn for training

HUES = torch.tensor(
    [
        [1.0, 0.12, 0.12],
        [1.0, 0.55, 0.05],
        [0.95, 0.92, 0.1],
        [0.15, 0.85, 0.2],
        [0.1, 0.85, 0.9],
        [0.2, 0.3, 1.0],
        [0.65, 0.2, 0.9],
        [1.0, 0.5, 0.75],
    ]
)


def is_held_out(values: Tensor) -> Tensor:
    """(n,) whether the shape-colour pair of values (n, 5) belongs to the test alone."""
    return (values[:, 0] * 3 + values[:, 1]) % HELD_OUT == 0


def draw_values(rng: torch.Generator, n: int, held_out: bool | None = None) -> Tensor:
    """(n, 5) values; `held_out` chooses among the shape-colour pairs, None takes all."""
    values = torch.stack([integers(rng, size, (n,)) for size in SIZES], dim=1)
    if held_out is None:
        return values
    if held_out:
        values[:, 1] = (-3 * values[:, 0]) % HELD_OUT
        return values
    other = (values[:, 1] + 1 + integers(rng, HELD_OUT - 1, (n,))) % HELD_OUT
    values[:, 1] = torch.where(is_held_out(values), other, values[:, 1])
    return values


def draw_scenes(rng: torch.Generator, values: Tensor) -> Tensor:
    """(n, 3, SIZE, SIZE) in 0..1, one picture of every row of values (n, 5)."""
    shape, colour, texture, count, place = values.T
    n = len(values)
    ground = _ground(rng, texture)
    mask = _shapes(rng, shape, count, place)[:, None]
    hue = HUES[colour] + normal(rng, (n, 3), 0.05)
    hue = (hue * uniform(rng, (n, 1), 0.8, 1.0)).clamp(0, 1)
    picture = ground * (1 - mask) + hue[:, :, None, None] * mask
    grain = normal(rng, picture.shape) * uniform(rng, (n, 1, 1, 1), 0.0, 0.05)
    return (picture + grain).clamp(0, 1)


def _grid() -> tuple[Tensor, Tensor]:
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    return across, down


def _ground(rng: torch.Generator, texture: Tensor) -> Tensor:
    across, down = _grid()
    n = len(texture)
    pitch = uniform(rng, (n, 1, 1), 4.0, 7.0) * 2 * math.pi
    phase = uniform(rng, (2, n, 1, 1), 0, 2 * math.pi)
    x, y = torch.sin(across * pitch + phase[0]), torch.sin(down * pitch + phase[1])
    slanted = torch.sin((across + down) * pitch * 0.8 + phase[0])
    dots = ((x > 0.45) & (y > 0.45)).float() * 2 - 1
    kinds = [torch.zeros_like(x), x.sign(), y.sign(), slanted.sign(), (x * y).sign(), dots]
    pattern = torch.stack(kinds, dim=1)[torch.arange(n), texture]
    base = uniform(rng, (n, 3, 1, 1), 0.15, 0.45)
    return base + uniform(rng, (n, 1, 1, 1), 0.06, 0.16) * pattern[:, None]


def _shapes(rng: torch.Generator, shape: Tensor, count: Tensor, place: Tensor) -> Tensor:
    """(n, SIZE, SIZE) in 0..1: up to four copies in the cells of one quarter of the frame."""
    across, down = _grid()
    n = len(shape)
    middle = torch.stack([place % 2, place // 2], dim=-1) * 0.5 + 0.25
    middle = middle + normal(rng, (n, 2), 0.015)
    cell = uniform(rng, (n, 4)).argsort(dim=1)
    corner = torch.stack([cell % 2, cell // 2], dim=-1) * 2 - 1
    centre = middle[:, None] + corner * 0.122 + normal(rng, (n, 4, 2), 0.01)
    shown = torch.arange(4)[None] <= count[:, None]
    radius = uniform(rng, (n, 1, 1, 1), 0.1, 0.118)
    x = across - centre[..., 0, None, None]
    y = down - centre[..., 1, None, None]
    inside = torch.stack(_distances(x, y, radius))[shape, torch.arange(n)]
    return (torch.sigmoid(-inside / 0.008) * shown[..., None, None]).amax(1)


def _distances(x: Tensor, y: Tensor, r: Tensor) -> list[Tensor]:
    """Signed distances, negative inside, in the order of the words for shapes."""
    ax, ay, radial = x.abs(), y.abs(), (x**2 + y**2).sqrt()
    cross = torch.minimum(
        torch.maximum(ax - r * 0.32, ay - r), torch.maximum(ay - r * 0.32, ax - r)
    )
    return [
        radial - r * 0.95,
        torch.maximum(ax, ay) - r * 0.85,
        torch.maximum(y - r * 0.75, ax * 1.6 - y * 0.9 - r * 0.75),
        cross,
        (radial - r * 0.72).abs() - r * 0.25,
        ax + ay - r * 1.1,
        torch.maximum(ax - r, ay - r * 0.36),
        torch.maximum(ax - r * 0.36, ay - r),
    ]


WORDS = ("invented", "plain")
COMBINATIONS = ("all", "held-out")
# All of a part are drawn at once, which was measured to take 1.3 MB each: 1.6 GB.
MOST = 1_200


@dataclass(frozen=True)
class Attributes:
    """`kb` scenes to show and `asked` to ask, each with a question for one random attribute.

    Every value of every attribute has one word: an invented one by the seed, or its plain English
    one. With `combos` held-out the asked scenes show only pairs of shape and colour that training
    never draws.
    """

    kb: int = 500
    asked: int = 500
    words: str = "invented"
    combos: str = "all"

    def __post_init__(self) -> None:
        check_knob("kb", self.kb, 1, MOST)
        check_knob("asked", self.asked, 1, MOST)
        check_word("words", self.words, WORDS)
        check_word("combos", self.combos, COMBINATIONS)

    def draw(self, seed: int) -> Task:
        seeds = Seeds(seed)
        words = self._words(seeds)
        shown = draw_values(seeds.pictures, self.kb)
        held_out = True if self.combos == "held-out" else None
        asked = draw_values(seeds.pictures, self.asked, held_out)
        return Task(
            knowledge=_examples(seeds, "shown", shown, words),
            items=_examples(seeds, "asked", asked, words),
            labels=tuple(word for attribute in ATTRIBUTES for word in words[attribute]),
        )

    def _words(self, seeds: Seeds) -> dict[str, tuple[str, ...]]:
        if self.words == "plain":
            return VALUES
        rest = iter(invented_words(seeds.words, sum(map(len, VALUES.values()))))
        return {attribute: tuple(next(rest) for _ in VALUES[attribute]) for attribute in VALUES}


def _examples(
    seeds: Seeds, part: str, values: Tensor, words: dict[str, tuple[str, ...]]
) -> tuple[Example, ...]:
    rng, examples = seeds.words, []
    pictures = images(draw_scenes(seeds.pictures, values))
    for place, (picture, row) in enumerate(zip(pictures, values.tolist(), strict=True)):
        topic = rng.choice(ATTRIBUTES)
        answer = words[topic][row[ATTRIBUTES.index(topic)]]
        text = question(rng, topic)
        id = f"attributes-{part}-{place}"
        examples.append(entry(id, text, answer, picture, tags={"topic": topic}))
    return tuple(examples)
