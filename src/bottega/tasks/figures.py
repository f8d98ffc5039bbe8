"""The ten figures and four plain symbols as pen strokes, redrawn with a shaking hand.

The strokes were written down for this module: no data set was traced. A figure has one or more
habits (an open or a closed four, a seven with a bar), as handwriting has.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.tasks.drawing import SIZE, frame, ink, pen_path
from bottega.tasks.strokes import VERTICES, normal, uniform

Stroke = tuple[bool, str]  # whether it is curved, and its vertices "x,y x,y ..." in a unit square
STROKES = 3
SYMBOLS = 4

CURVE, LINE = True, False
HABITS: tuple[tuple[tuple[Stroke, ...], ...], ...] = (
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
MOST_HABITS = max(len(habits) for habits in HABITS)


@dataclass(frozen=True)
class Table:
    """Every figure's habits as tensors, `MOST_HABITS` a figure, the last repeated."""

    vertices: Tensor  # (figures, MOST_HABITS, STROKES, VERTICES, 2)
    smooth: Tensor  # (figures, MOST_HABITS, STROKES)
    used: Tensor  # (figures, MOST_HABITS, STROKES) bool
    habits: Tensor  # (figures,) how many there are


def _stretched(text: str) -> Tensor:
    """Exactly VERTICES vertices: the longest segment is halved until there are enough."""
    points = [tuple(float(x) for x in pair.split(",")) for pair in text.split()]
    line = torch.tensor(points)
    while len(line) < VERTICES:
        longest = int((line[1:] - line[:-1]).norm(dim=1).argmax())
        middle = (line[longest] + line[longest + 1]) / 2
        line = torch.cat([line[: longest + 1], middle[None], line[longest + 1 :]])
    return line


@functools.cache
def _table() -> Table:
    shape = (len(HABITS), MOST_HABITS, STROKES)
    vertices, smooth = torch.zeros(*shape, VERTICES, 2), torch.zeros(shape)
    used = torch.zeros(shape, dtype=torch.bool)
    for figure, habits in enumerate(HABITS):
        for habit, strokes in enumerate(habits):
            for stroke, (curved, text) in enumerate(strokes):
                vertices[figure, habit, stroke] = _stretched(text)
                smooth[figure, habit, stroke] = float(curved)
                used[figure, habit, stroke] = True
    return Table(vertices, smooth, used, torch.tensor([len(habits) for habits in HABITS]))


def sketch(rng: torch.Generator, kind: Tensor, jitter: float = 1.0) -> tuple[Tensor, Tensor]:
    """One shaky drawing of each `kind` (n,), 0-9 a figure, 10-13 a symbol: points
    (n, STROKES, SAMPLES, 2) whose longer side fills the unit square, and used (n, STROKES)."""
    table, n = _table(), len(kind)
    habit = (uniform(rng, (n,)) * table.habits[kind]).long()
    vertices, used = table.vertices[kind, habit], table.used[kind, habit]
    # Shared vertices move together: a shift of the stroke's ends would tear a figure apart.
    shake = normal(rng, (n, 1, 1, 1), 0.35).exp() * jitter
    vertices = vertices * torch.tensor([0.66, 1.0])
    wave, phase = normal(rng, (n, 2, 2), 5.0), uniform(rng, (n, 1, 2), 0, 6.28)
    bend = torch.sin(vertices.flatten(1, 2) @ wave + phase).view_as(vertices)
    vertices = vertices + 0.035 * shake * bend + normal(rng, vertices.shape, 0.022) * shake
    smooth = table.smooth[kind, habit]
    loose = uniform(rng, smooth.shape, 0, 0.5) * (smooth < 0.5)
    points = pen_path(vertices, smooth + loose)
    return frame(rng, points, used, torch.ones(n), free=0.0, jitter=jitter), used


def draw_figures(
    rng: torch.Generator, kind: Tensor, boldness: Tensor, fill: Tensor, jitter: float = 1.2
) -> Tensor:
    """(n, SIZE, SIZE) ink of single figures; `fill` (n,) is their share of the frame."""
    points, used = sketch(rng, kind, jitter)
    width = (normal(rng, (len(kind),), 0.3).exp() * 0.02 * SIZE * boldness).clamp(0.8, 4.0)
    room = (fill * (1 - 2 * width / SIZE))[:, None, None, None]
    return ink((points - 0.5) * room + 0.5, used, width, uniform(rng, (len(kind),), 1.0, 2.2))


def draw_rows(rng: torch.Generator, kinds: Tensor, boldness: Tensor) -> Tensor:
    """(n, SIZE, SIZE) ink of `kinds` (n, 3) side by side: figure, symbol, figure."""
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
