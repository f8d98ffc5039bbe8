"""Synthetic task of hidden rules: a symbol between two digits means an operation.

Digits and symbols are pen strokes, rendered with a shaky hand. The strokes were written for this
module, without a data set. A character has one or more variants (an open or a closed four, a seven
with a bar), as handwriting has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.tasks.handwriting import (
    SIZE,
    VERTICES,
    chance,
    frame,
    ink,
    integers,
    normal,
    paint,
    pen_path,
    sample_styles,
    uniform,
)
from bottega.tasks.task import (
    RandomSources,
    TaskData,
    check_images,
    check_range,
    join_episodes,
    make_example,
    question,
    to_images,
)
from bottega.types import Example

Stroke = tuple[bool, str]  # curved or not, and vertices "x,y x,y ..." in the unit square
STROKES = 3
SYMBOLS = 4

CURVE, LINE = True, False
VARIANTS: tuple[tuple[tuple[Stroke, ...], ...], ...] = (
    (
        ((CURVE, ".5,0 .12,.25 .08,.68 .45,1 .9,.72 .9,.25 .5,0"),),
        ((CURVE, ".62,.02 .2,.12 .05,.6 .4,1 .85,.8 .92,.35 .55,.02"),),
    ),
    (
        ((LINE, ".5,0 .5,1"),),
        ((LINE, ".2,.27 .55,0 .55,1"),),
        ((LINE, ".2,.22 .5,0 .5,1"), (LINE, ".15,1 .85,1")),
    ),
    (
        ((CURVE, ".08,.25 .35,.02 .8,.1 .8,.4 .4,.75 .05,1"), (LINE, ".05,1 .95,.98")),
        ((CURVE, ".1,.2 .5,0 .85,.25 .5,.72 .12,.97 .5,.9 .97,.98"),),
    ),
    (
        ((CURVE, ".1,.12 .5,0 .88,.2 .4,.47"), (CURVE, ".4,.47 .92,.65 .6,.98 .05,.9")),
        ((LINE, ".1,0 .85,0 .45,.4"), (CURVE, ".45,.4 .92,.62 .6,.98 .05,.9")),
    ),
    (
        ((LINE, ".3,0 .05,.6 .97,.6"), (LINE, ".72,.3 .65,1")),
        ((LINE, ".68,0 .05,.68 .97,.68"), (LINE, ".68,0 .66,1")),
    ),
    (
        (
            (LINE, ".9,0 .2,0 .15,.45"),
            (CURVE, ".15,.45 .6,.36 .93,.65 .6,.99 .05,.92"),
        ),
        ((CURVE, ".88,.02 .28,.06 .2,.42 .75,.5 .85,.8 .45,1 .08,.9"),),
    ),
    (
        ((CURVE, ".72,0 .25,.3 .1,.7 .45,1 .88,.76 .52,.5 .14,.7"),),
        ((CURVE, ".4,0 .12,.4 .1,.8 .5,1 .85,.78 .55,.55 .14,.75"),),
    ),
    (
        ((LINE, ".05,0 .95,0 .4,1"),),
        ((LINE, ".05,0 .95,0 .45,1"), (LINE, ".28,.5 .82,.5")),
        ((CURVE, ".08,.2 .2,.02 .6,.08 .92,0 .6,.45 .4,1"),),
    ),
    (
        (
            (CURVE, ".5,.47 .15,.25 .5,0 .85,.25 .5,.47"),
            (CURVE, ".5,.47 .07,.75 .5,1 .93,.75 .5,.47"),
        ),
        (
            (CURVE, ".8,.15 .4,0 .15,.25 .5,.48 .88,.75 .5,1 .1,.75"),
            (CURVE, ".1,.75 .3,.55 .65,.4 .85,.2 .8,.15"),
        ),
    ),
    (
        ((CURVE, ".85,.25 .45,.5 .12,.28 .45,0 .85,.2"), (CURVE, ".85,.2 .82,.6 .6,1")),
        ((CURVE, ".85,.25 .5,.52 .1,.28 .5,0 .85,.2"), (CURVE, ".87,.15 .86,.7 .5,1 .1,.9")),
    ),
    (((CURVE, ".5,0 .07,.25 .07,.75 .5,1 .93,.75 .93,.25 .5,0"),),),
    (((LINE, ".5,.05 .97,.95 .03,.95 .5,.05"),),),
    (((LINE, ".05,.05 .95,.95"), (LINE, ".95,.05 .05,.95")),),
    (((LINE, ".05,.05 .95,.05 .95,.95 .05,.95 .05,.05"),),),
)  # fmt: skip
MAX_VARIANTS = max(len(variants) for variants in VARIANTS)
NUMBERS = 10
HELD_OUT = 4  # training never renders one in HELD_OUT pairs of numbers
RULES: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "differ": lambda a, b: abs(a - b),
    "larger": max,
    "smaller": min,
}


@dataclass(frozen=True)
class CharacterTable:
    """Variants of all characters as tensors, `MAX_VARIANTS` per character, the rest zeros."""

    vertices: Tensor  # (characters, MAX_VARIANTS, STROKES, VERTICES, 2)
    smooth: Tensor  # (characters, MAX_VARIANTS, STROKES)
    used: Tensor  # (characters, MAX_VARIANTS, STROKES) bool
    variants: Tensor  # (characters,) number of variants


def _parse_stroke(text: str) -> Tensor:
    """Return (VERTICES, 2) vertices; the longest segment is halved until there are enough."""
    points = [tuple(float(x) for x in pair.split(",")) for pair in text.split()]
    line = torch.tensor(points)
    while len(line) < VERTICES:
        longest = int((line[1:] - line[:-1]).norm(dim=1).argmax())
        middle = (line[longest] + line[longest + 1]) / 2
        line = torch.cat([line[: longest + 1], middle[None], line[longest + 1 :]])
    return line


@functools.cache
def _table() -> CharacterTable:
    shape = (len(VARIANTS), MAX_VARIANTS, STROKES)
    vertices, smooth = torch.zeros(*shape, VERTICES, 2), torch.zeros(shape)
    used = torch.zeros(shape, dtype=torch.bool)
    for character, variants in enumerate(VARIANTS):
        for variant, strokes in enumerate(variants):
            for stroke, (curved, text) in enumerate(strokes):
                vertices[character, variant, stroke] = _parse_stroke(text)
                smooth[character, variant, stroke] = float(curved)
                used[character, variant, stroke] = True
    return CharacterTable(
        vertices, smooth, used, torch.tensor([len(variants) for variants in VARIANTS])
    )


def sketch(rng: torch.Generator, kind: Tensor, jitter: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sketch each `kind` (n,) once: 0-9 is a digit, 10-13 a symbol. Returns points (n, STROKES,
    SAMPLES, 2), whose longer side fills the unit square, and a mask of used strokes (n,
    STROKES)."""
    table, n = _table(), len(kind)
    variant = (uniform(rng, (n,)) * table.variants[kind]).long()
    vertices, used = table.vertices[kind, variant], table.used[kind, variant]
    # Strokes share vertices: moving the ends of one stroke alone would break the character.
    shake = normal(rng, (n, 1, 1, 1), 0.35).exp() * jitter
    vertices = vertices * torch.tensor([0.66, 1.0])
    wave, phase = normal(rng, (n, 2, 2), 5.0), uniform(rng, (n, 1, 2), 0, 6.28)
    bend = torch.sin(vertices.flatten(1, 2) @ wave + phase).view_as(vertices)
    vertices = vertices + 0.035 * shake * bend + normal(rng, vertices.shape, 0.022) * shake
    smooth = table.smooth[kind, variant]
    loose = uniform(rng, smooth.shape, 0, 0.5) * (smooth < 0.5)
    points = pen_path(vertices, smooth + loose)
    return frame(rng, points, used, torch.ones(n), free=0.0, jitter=jitter), used


def draw_row_ink(rng: torch.Generator, kinds: Tensor, boldness: Tensor) -> Tensor:
    """Draw `kinds` (n, 3), digit, symbol, digit, side by side: ink (n, SIZE, SIZE)."""
    n = len(kinds)
    size = torch.tensor([0.56, 0.26, 0.56]) * normal(rng, (n, 3), 0.06).exp().clamp(0.85, 1.15)
    centre = torch.tensor([0.2, 0.5, 0.8]) + normal(rng, (n, 3), 0.012)
    height = 0.5 + normal(rng, (n, 1), 0.05) + normal(rng, (n, 3), 0.015)
    points, used = sketch(rng, kinds.flatten(), jitter=0.9)
    points = (points - 0.5) * size.flatten()[:, None, None, None]
    points = points + torch.stack([centre, height], -1).view(-1, 1, 1, 2)
    width = (normal(rng, (n,), 0.2).exp() * 0.017 * SIZE * boldness).clamp(0.75, 2.2)
    points, used = points.view(n, -1, *points.shape[2:]), used.view(n, -1)
    return ink(points, used, width, uniform(rng, (n,), 1.2, 2.2))


def is_held_out(left: Tensor, right: Tensor) -> Tensor:
    """Return booleans: whether each pair of numbers is held out from training."""
    return (left * 3 + right) % HELD_OUT == 0


def sample_rows(rng: torch.Generator, n: int, held_out: bool | None = None) -> Tensor:
    """Sample rows (n, 3): left number, symbol, right number. `held_out` restricts the pairs."""
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


def render_rows(rng: torch.Generator, values: Tensor) -> Tensor:
    """Render one image per row of values (n, 3): (n, 3, 64, 64) in 0..1."""
    style = sample_styles(rng, len(values))
    style.resolution = chance(rng, (len(values),), 0.3).long()  # full or half resolution
    style.boldness = uniform(rng, (len(values),), 0.9, 1.6)
    kinds = values + torch.tensor([0, NUMBERS, 0])
    return paint(rng, draw_row_ink(rng, kinds, style.boldness), style)


@dataclass(frozen=True)
class RuleTask:
    """Task of episodes that assign a rule to `symbols` of the four symbols. Each episode has
    `examples` rows with their results and `queries` rows without. The number pairs of the queries
    occur in no example and were never used in training."""

    symbols: int = 3
    examples: int = 24
    queries: int = 20
    episodes: int = 25

    def __post_init__(self) -> None:
        check_range("symbols", self.symbols, 1, min(SYMBOLS, len(RULES)))
        check_range("examples", self.examples, self.symbols, 200)
        check_range("queries", self.queries, 1, 200)
        check_range("episodes", self.episodes, 1, 500)
        check_images(
            self.episodes * (self.examples + self.queries), "episodes, examples or queries"
        )

    def generate(self, seed: int) -> TaskData:
        sources = RandomSources(seed)
        return join_episodes(self._episode(sources, number) for number in range(self.episodes))

    def _episode(self, sources: RandomSources, episode: int) -> tuple[list[Example], list[Example]]:
        chosen = sources.words.sample(range(SYMBOLS), self.symbols)
        rules = dict(zip(chosen, sources.words.sample(list(RULES), self.symbols), strict=True))
        return (
            _rows(sources, f"{episode}-shown", self.examples, rules, held_out=False),
            _rows(sources, f"{episode}-asked", self.queries, rules, held_out=True),
        )


def _rows(
    sources: RandomSources, part: str, count: int, rules: Mapping[int, str], *, held_out: bool
) -> list[Example]:
    rng = sources.words
    values = sample_rows(sources.images, count, held_out)
    # Symbols are shuffled, not sampled: each one must occur among the examples.
    symbols = [list(rules)[i % len(rules)] for i in range(count)]
    values[:, 1] = torch.tensor(rng.sample(symbols, count))
    images = to_images(render_rows(sources.images, values))
    examples = []
    for index, (image, row) in enumerate(zip(images, values.tolist(), strict=True)):
        left, symbol, right = row
        tags = {"episode": part.partition("-")[0], "topic": "symbol", "rule": rules[symbol]}
        example = make_example(
            f"rules-{part}-{index}", question(rng, "symbol"), "", image, tags=tags
        )
        examples.append(_solved(example, rules[symbol], left, right))
    return examples


def misapply_rule(example: Example, rng: random.Random) -> Example | None:
    """Return the row solved by another rule with another result: wrong but self-consistent. Return
    None if all rules give the same result, as for two zeros."""
    _, left, right = str(example.rationale).split()
    results = {rule: str(work(int(left), int(right))) for rule, work in RULES.items()}
    others = [rule for rule, result in results.items() if result != example.answer]
    return _solved(example, rng.choice(others), int(left), int(right)) if others else None


def _solved(example: Example, rule: str, left: int, right: int) -> Example:
    return replace(
        example, answer=str(RULES[rule](left, right)), rationale=f"{rule} {left} {right}"
    )
