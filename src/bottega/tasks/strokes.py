"""Written characters as motor programs, and seeded random draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Shape = Sequence[int]


def uniform(rng: torch.Generator, shape: Shape, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) * (high - low) + low


def normal(rng: torch.Generator, shape: Shape, scale: float = 1.0) -> Tensor:
    return torch.randn(tuple(shape), generator=rng) * scale


def integers(rng: torch.Generator, high: int, shape: Shape) -> Tensor:
    return torch.randint(0, high, tuple(shape), generator=rng)


def chance(rng: torch.Generator, shape: Shape, probability: float) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) < probability


def pick(rng: torch.Generator, weights: Sequence[float], count: int) -> Tensor:
    """`count` indices drawn in proportion to `weights`."""
    return torch.multinomial(torch.tensor(weights), count, replacement=True, generator=rng)


def sign(rng: torch.Generator, shape: Shape) -> Tensor:
    return torch.where(chance(rng, shape, 0.5), 1.0, -1.0)


STROKES = 5
VERTICES = 7
TURNS = VERTICES - 2
LINE, ARC, LOOP, CORNERS, WAVE, FREE = range(6)


@dataclass
class Strokes:
    """Turtle strokes, with any leading shape: what the pen does once it is down."""

    turns: Tensor  # (..., TURNS) radians between segments
    heading: Tensor  # (...) radians of the middle of the stroke
    length: Tensor  # (...)
    smooth: Tensor  # (...) 0 draws corners, 1 a curve
    pace: Tensor  # (..., VERTICES - 1) relative segment lengths


@dataclass
class Programs(Strokes):
    """One character a row: STROKES strokes and how they hang together."""

    count: Tensor  # (n,) strokes in use
    vertex: Tensor  # (n, STROKES) own vertex that is attached
    host: Tensor  # (n, STROKES) earlier stroke it hangs on
    host_vertex: Tensor  # (n, STROKES)
    offset: Tensor  # (n, STROKES, 2)

    def __len__(self) -> int:
        return len(self.count)

    def rows(self, index: Tensor) -> Programs:
        return Programs(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def join(parts: list[Programs]) -> Programs:
    return Programs(
        **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Programs)}
    )


def draw_strokes(rng: torch.Generator, n: int) -> Strokes:
    """`n` primitive strokes: lines, arcs, loops, corners, waves and free curves."""
    kind = pick(rng, (0.30, 0.24, 0.07, 0.17, 0.12, 0.10), n)
    compass = integers(rng, 8, (n,)) * math.pi / 4 + normal(rng, (n,), 0.12)
    heading = torch.where(chance(rng, (n,), 0.7), compass, uniform(rng, (n,), 0, 2 * math.pi))
    length = uniform(rng, (n,), 0.35, 1.0) * torch.where(kind == LINE, 1.0, 1.35)
    length = torch.where(kind == LOOP, uniform(rng, (n,), 0.35, 1.6), length)
    length = torch.where(chance(rng, (n,), 0.12), length * 0.35, length)
    cornered = torch.where(chance(rng, (n,), 0.75), 0.0, 0.7)
    smooth = torch.where(kind == CORNERS, cornered, 1.0)
    uneven = chance(rng, (n, VERTICES - 1), 0.25)
    pace = torch.where(uneven, uniform(rng, (n, VERTICES - 1), 0.5, 1.6), 1.0)
    turns = torch.stack(_turns_by_kind(rng, n), dim=1)[torch.arange(n), kind]
    return Strokes(turns, heading, length, smooth, pace)


def _turns_by_kind(rng: torch.Generator, n: int) -> list[Tensor]:
    way = sign(rng, (n, 1))
    line = normal(rng, (n, 1), 0.05).expand(-1, TURNS)
    arc = (uniform(rng, (n, 1), 0.25, 1.75) * math.pi / TURNS * way).expand(-1, TURNS)
    loop = 2 * math.pi / (VERTICES - 1) * way * uniform(rng, (n, 1), 0.97, 1.15)
    sharp = uniform(rng, (n, TURNS), 0.3, 0.8) * math.pi * sign(rng, (n, TURNS))
    rank = uniform(rng, (n, TURNS)).argsort(dim=1)
    corners = torch.where(rank <= integers(rng, 3, (n, 1)), sharp, 0.0)
    bend = uniform(rng, (n, 1), 0.25, 0.9) * way
    before = torch.arange(TURNS)[None] <= integers(rng, 3, (n, 1)) + 1
    wave = torch.where(before, bend, -bend * uniform(rng, (n, 1), 0.5, 1.2))
    return [line, arc, loop.expand(-1, TURNS), corners, wave, normal(rng, (n, TURNS), 0.7)]


def alphabet(rng: torch.Generator, n: int, library: int = 9, shared: float = 0.75) -> Programs:
    """`n` characters, most of whose strokes come from one library of `library` strokes."""
    common, own = draw_strokes(rng, library), draw_strokes(rng, n * STROKES)
    use = chance(rng, (n, STROKES), shared)
    which = integers(rng, library, (n, STROKES))
    strokes = {}
    for name in (f.name for f in fields(Strokes)):
        rest = getattr(own, name).unflatten(0, (n, STROKES))
        mask = use[..., None] if rest.ndim == 3 else use
        strokes[name] = torch.where(mask, getattr(common, name)[which], rest)
    quarter = (integers(rng, 3, (n, STROKES)) + 1) * math.pi / 2
    strokes["heading"] = strokes["heading"] + quarter * chance(rng, (n, STROKES), 0.25)
    mirrored = chance(rng, (n, STROKES, 1), 0.15)
    strokes["turns"] = torch.where(mirrored, -strokes["turns"], strokes["turns"])
    strokes["length"] = strokes["length"] * normal(rng, (n, STROKES), 0.15).exp()
    return Programs(**strokes, **_layout(rng, n))


def _layout(rng: torch.Generator, n: int) -> dict[str, Tensor]:
    mood = torch.tensor([0.17, 0.30, 0.27, 0.16, 0.10]).log() + normal(rng, (STROKES,), 0.4)
    places = torch.tensor([0, 0, 0, 3, 6, 6, 2, 4])
    apart = chance(rng, (n, STROKES, 1), 0.3)
    far = uniform(rng, (n, STROKES, 2), -0.6, 0.6)
    return {
        "count": pick(rng, mood.softmax(0).tolist(), n) + 1,
        "vertex": places[integers(rng, 8, (n, STROKES))],
        "host": (uniform(rng, (n, STROKES)) * torch.arange(STROKES)).long(),
        "host_vertex": places[integers(rng, 8, (n, STROKES))],
        "offset": torch.where(apart, far, normal(rng, (n, STROKES, 2), 0.03)),
    }


def siblings(rng: torch.Generator, parents: Programs) -> Programs:
    """Each parent after one edit: a stroke replaced, added or dropped, moved, turned, mirrored."""
    n = len(parents)
    child = parents.rows(torch.arange(n))
    edit, row = integers(rng, 5, (n,)), torch.arange(n)
    stroke = (uniform(rng, (n,)) * child.count).long()
    fresh = draw_strokes(rng, n)
    for name in (f.name for f in fields(Strokes)):
        old, new = getattr(child, name), getattr(fresh, name)
        mask = (edit == 0)[:, None] if new.ndim == 2 else edit == 0
        old[row, stroke] = torch.where(mask, new, old[row, stroke])
    grown = torch.where(child.count < STROKES, child.count + 1, child.count - 1)
    child.count = torch.where(edit == 1, grown, child.count)
    moved = (edit == 2) & (stroke > 0)
    vertex = child.host_vertex[row, stroke]
    child.host_vertex[row, stroke] = torch.where(moved, (vertex + 3) % VERTICES, vertex)
    turned = (edit == 3) | ((edit == 2) & (stroke == 0))
    swing = uniform(rng, (n,), 0.6, 2.6) * sign(rng, (n,))
    child.heading[row, stroke] += torch.where(turned, swing, 0.0)
    mirrored = edit == 4
    bent = child.turns[row, stroke]
    flipped = -bent + normal(rng, (n, TURNS), 0.15)
    child.turns[row, stroke] = torch.where(mirrored[:, None], flipped, bent)
    child.length[row, stroke] *= torch.where(mirrored, uniform(rng, (n,), 0.45, 0.75), 1.0)
    return child
