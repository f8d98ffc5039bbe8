"""Synthetic task of scenes with five attributes; the question selects the attribute to name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.tasks.handwriting import integers, normal, uniform
from bottega.tasks.task import (
    RandomSources,
    TaskData,
    check_choice,
    check_range,
    invented_words,
    make_example,
    question,
    to_images,
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
HELD_OUT = 8  # training never renders one in HELD_OUT shape-colour pairs

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
    """Return (n,) booleans: whether the shape-colour pair of each row of values (n, 5) is held
    out."""
    return (values[:, 0] * 3 + values[:, 1]) % HELD_OUT == 0


def sample_values(rng: torch.Generator, n: int, held_out: bool | None = None) -> Tensor:
    """Sample attribute values (n, 5). `held_out` restricts the shape-colour pairs; None uses
    all."""
    values = torch.stack([integers(rng, size, (n,)) for size in SIZES], dim=1)
    if held_out is None:
        return values
    if held_out:
        values[:, 1] = (-3 * values[:, 0]) % HELD_OUT
        return values
    other = (values[:, 1] + 1 + integers(rng, HELD_OUT - 1, (n,))) % HELD_OUT
    values[:, 1] = torch.where(is_held_out(values), other, values[:, 1])
    return values


def render_scenes(rng: torch.Generator, values: Tensor) -> Tensor:
    """Render one image per row of values (n, 5): (n, 3, SIZE, SIZE) in 0..1."""
    shape, colour, texture, count, place = values.T
    n = len(values)
    background = _background(rng, texture)
    mask = _shapes(rng, shape, count, place)[:, None]
    hue = HUES[colour] + normal(rng, (n, 3), 0.05)
    hue = (hue * uniform(rng, (n, 1), 0.8, 1.0)).clamp(0, 1)
    image = background * (1 - mask) + hue[:, :, None, None] * mask
    grain = normal(rng, image.shape) * uniform(rng, (n, 1, 1, 1), 0.0, 0.05)
    return (image + grain).clamp(0, 1)


def _grid() -> tuple[Tensor, Tensor]:
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    return across, down


def _background(rng: torch.Generator, texture: Tensor) -> Tensor:
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
    """Return shape masks (n, SIZE, SIZE) in 0..1: up to four copies in one quarter of the frame."""
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
    # Signed distances, negative inside, in the order of the shape words.
    ax, ay, radial = x.abs(), y.abs(), (x**2 + y**2).sqrt()
    cross = torch.minimum(
        torch.maximum(ax - radius * 0.32, ay - radius),
        torch.maximum(ay - radius * 0.32, ax - radius),
    )
    distances = [
        radial - radius * 0.95,
        torch.maximum(ax, ay) - radius * 0.85,
        torch.maximum(y - radius * 0.75, ax * 1.6 - y * 0.9 - radius * 0.75),
        cross,
        (radial - radius * 0.72).abs() - radius * 0.25,
        ax + ay - radius * 1.1,
        torch.maximum(ax - radius, ay - radius * 0.36),
        torch.maximum(ax - radius * 0.36, ay - radius),
    ]
    inside = torch.stack(distances)[shape, torch.arange(n)]
    return (torch.sigmoid(-inside / 0.008) * shown[..., None, None]).amax(1)


WORDS = ("invented", "plain")
COMBINATIONS = ("all", "held-out")
# One batch renders all scenes, at 1.3 MB a scene (measured): 1.6 GB.
MAX_SCENES = 1_200


@dataclass(frozen=True)
class AttributeTask:
    """Task of `examples` scenes as knowledge base and `queries` scenes to query.

    Each question is about one random attribute. Each attribute value has one word: invented from
    the seed, or plain English. With `combos` held-out the query scenes show only shape-colour pairs
    that training never renders.
    """

    examples: int = 500
    queries: int = 500
    words: str = "invented"
    combos: str = "all"

    def __post_init__(self) -> None:
        check_range("examples", self.examples, 1, MAX_SCENES)
        check_range("queries", self.queries, 1, MAX_SCENES)
        check_choice("words", self.words, WORDS)
        check_choice("combos", self.combos, COMBINATIONS)

    def generate(self, seed: int) -> TaskData:
        sources = RandomSources(seed)
        words = VALUES
        if self.words == "invented":
            rest = iter(invented_words(sources.words, sum(map(len, VALUES.values()))))
            words = {name: tuple(next(rest) for _ in VALUES[name]) for name in ATTRIBUTES}
        examples = sample_values(sources.images, self.examples)
        held_out = True if self.combos == "held-out" else None
        queries = sample_values(sources.images, self.queries, held_out)
        return TaskData(
            knowledge=_examples(sources, "shown", examples, words),
            items=_examples(sources, "asked", queries, words),
            labels=tuple(word for attribute in ATTRIBUTES for word in words[attribute]),
        )


def _examples(
    sources: RandomSources, part: str, values: Tensor, words: dict[str, tuple[str, ...]]
) -> tuple[Example, ...]:
    rng, examples = sources.words, []
    images = to_images(render_scenes(sources.images, values))
    for index, (image, row) in enumerate(zip(images, values.tolist(), strict=True)):
        topic = rng.choice(ATTRIBUTES)
        answer = words[topic][row[ATTRIBUTES.index(topic)]]
        text = question(rng, topic)
        id = f"attributes-{part}-{index}"
        examples.append(make_example(id, text, answer, image, tags={"topic": topic}))
    return tuple(examples)
