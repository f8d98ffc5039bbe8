"""From motor programs to ink: run each program with jitter, then press a soft pen along it."""

import functools

import torch
from torch import Tensor

from bottega.tasks.strokes import STROKES, VERTICES, Programs, chance, normal, uniform

SIZE = 64
SAMPLES = 48  # points along a stroke: dense enough that a thin pen leaves no gaps


@functools.cache
def _curves() -> tuple[Tensor, Tensor]:
    """Two (SAMPLES, VERTICES) interpolators: straight segments and Catmull-Rom curves."""
    t = torch.linspace(0, VERTICES - 1 - 1e-4, SAMPLES)
    start, f = t.long(), t - t.long()
    row = torch.arange(SAMPLES)
    straight = torch.zeros(SAMPLES, VERTICES)
    straight[row, start], straight[row, start + 1] = 1 - f, f
    # Phantom end points continue the first and last segment, hence the padded columns.
    padded = torch.zeros(SAMPLES, VERTICES + 2)
    weights = (
        -0.5 * f**3 + f**2 - 0.5 * f,
        1.5 * f**3 - 2.5 * f**2 + 1,
        -1.5 * f**3 + 2 * f**2 + 0.5 * f,
        0.5 * f**3 - 0.5 * f**2,
    )
    for k, weight in enumerate(weights):
        padded[row, start + k] = weight
    curve = padded[:, 1:-1].clone()
    curve[:, 0] += 2 * padded[:, 0]
    curve[:, 1] -= padded[:, 0]
    curve[:, -1] += 2 * padded[:, -1]
    curve[:, -2] -= padded[:, -1]
    return straight, curve


def trace(rng: torch.Generator, programs: Programs, jitter: float) -> Tensor:
    """Run each program once with a shaky hand: (n, STROKES, SAMPLES, 2) points."""
    n = len(programs)
    shake = jitter * normal(rng, (n, 1), 0.35).exp().clamp(0.3, 2.0)
    each = shake[..., None]
    scale = 1 + normal(rng, (n, STROKES, 1), 0.10) * each
    turns = programs.turns * scale + normal(rng, programs.turns.shape, 0.11) * each
    heading = programs.heading + normal(rng, (n, STROKES), 0.10) * shake
    length = programs.length * (normal(rng, (n, STROKES), 0.14) * shake).exp()
    pace = programs.pace * (normal(rng, programs.pace.shape, 0.15) * each).exp()
    # The heading belongs to the middle of the stroke: extra turning is split between its ends.
    surplus = turns.sum(-1, keepdim=True) - programs.turns.sum(-1, keepdim=True)
    bends = torch.cat([torch.zeros(n, STROKES, 1), turns.cumsum(-1)], dim=-1)
    angle = heading[..., None] + bends - surplus / 2
    step = pace / pace.sum(-1, keepdim=True) * length[..., None]
    moves = torch.stack([angle.cos() * step, angle.sin() * step], dim=-1)
    path = torch.cat([torch.zeros(n, STROKES, 1, 2), moves.cumsum(2)], dim=2)
    offset = programs.offset + normal(rng, programs.offset.shape, 0.035) * each
    return _smoothed(rng, programs, _attached(programs, path, offset))


def _attached(programs: Programs, path: Tensor, offset: Tensor) -> Tensor:
    row = torch.arange(len(programs))
    placed = [path[:, 0]]
    for s in range(1, STROKES):
        hosts = torch.stack(placed, dim=1)
        target = hosts[row, programs.host[:, s], programs.host_vertex[:, s]] + offset[:, s]
        own = path[row, s, programs.vertex[:, s]]
        placed.append(path[:, s] + (target - own)[:, None])
    return torch.stack(placed, dim=1)


def _smoothed(rng: torch.Generator, programs: Programs, path: Tensor) -> Tensor:
    loose = uniform(rng, programs.smooth.shape, 0, 0.35) * (programs.smooth < 0.5)
    return pen_path(path, (programs.smooth + loose).clamp(0, 1))


def pen_path(vertices: Tensor, smooth: Tensor) -> Tensor:
    """(..., VERTICES, 2) vertices to (..., SAMPLES, 2) points. `smooth` (...) 0 cuts corners, 1
    bends through them."""
    straight, curve = _curves()
    smooth = smooth[..., None, None]
    return (1 - smooth) * (straight @ vertices) + smooth * (curve @ vertices)


def frame(
    rng: torch.Generator, points: Tensor, used: Tensor, fill: Tensor, free: float, jitter: float
) -> Tensor:
    """Slant, warp and fit to the unit square: the longer side gets `fill` (n,) of it.

    A share `free` of the drawings is smaller and placed anywhere.
    """
    n = len(points)
    flat = points.flatten(1, 2)
    mask = used[:, :, None].expand(-1, -1, points.shape[2]).flatten(1)[..., None]
    turn, shear = normal(rng, (n,), 0.09 * jitter), normal(rng, (n,), 0.12 * jitter)
    wide = normal(rng, (n,), 0.12 * jitter).exp()
    cos, sin = turn.cos(), turn.sin()
    rows = [torch.stack([cos * wide, shear * cos - sin], -1)]
    rows.append(torch.stack([sin * wide, cos + shear * sin], -1))
    flat = flat @ torch.stack(rows, dim=1).transpose(1, 2)
    flat = _unit(flat, mask)
    wave, phase = normal(rng, (n, 2, 2), 2.5), uniform(rng, (n, 1, 2), 0, 6.28)
    bent = torch.sin(flat @ wave.transpose(1, 2) + phase)
    flat = flat + bent * normal(rng, (n, 1, 2), 0.025 * jitter)
    flat = _unit(flat, mask)
    roams = chance(rng, (n, 1, 1), free)
    size = torch.where(roams, uniform(rng, (n, 1, 1), 0.45, 0.95), fill[:, None, None])
    room = (1 - size) / 2 * uniform(rng, (n, 1, 2), -1, 1) * roams
    return (flat * size + 0.5 + room + normal(rng, (n, 1, 2), 0.012)).view_as(points)


def _unit(points: Tensor, mask: Tensor) -> Tensor:
    """Centre the drawn points and bring their longer side to 1."""
    low = points.masked_fill(~mask, 9.0).amin(1, keepdim=True)
    high = points.masked_fill(~mask, -9.0).amax(1, keepdim=True)
    return (points - (low + high) / 2) / (high - low).amax(2, keepdim=True).clamp(min=0.1)


def ink(points: Tensor, used: Tensor, width: Tensor, pressure: Tensor) -> Tensor:
    """(n, SIZE, SIZE) in 0..1. `width` (n,) is the pen's sigma in pixels of a SIZE frame.

    A Gaussian pen is separable, so a drawing is one small matrix product.
    """
    x = points * SIZE
    move = (x[:, :, 1:] - x[:, :, :-1]).norm(dim=-1)
    move = torch.cat([move, move[:, :, -1:]], dim=-1) * used[..., None]
    x, move, sigma = x.flatten(1, 2), move.flatten(1), width[:, None]
    grid = torch.arange(SIZE) + 0.5
    narrow = (-0.5 / sigma**2)[..., None]
    across = torch.exp((x[..., 0:1] - grid) ** 2 * narrow)
    down = torch.exp((x[..., 1:2] - grid) ** 2 * narrow) * (move / (sigma * 2.5066))[..., None]
    return (down.transpose(1, 2) @ across * pressure[:, None, None]).clamp(max=1.0)


def draw(
    rng: torch.Generator,
    programs: Programs,
    boldness: Tensor,
    fill: Tensor,
    free: float = 0.15,
    jitter: float = 1.0,
) -> Tensor:
    """One drawing of every row: (n, SIZE, SIZE) ink.

    `boldness` (n,) multiplies the pen width, `fill` (n,) is the share of the frame it takes,
    `free` the share of drawings placed anywhere, `jitter` how unsteady the hand is.
    """
    used = torch.arange(STROKES)[None] < programs.count[:, None]
    points = frame(rng, trace(rng, programs, jitter), used, fill, free, jitter)
    n = len(programs)
    width = normal(rng, (n,), 0.38).exp() * 0.0145 * SIZE * boldness
    width = width.clamp(0.5, 3.4)  # neither dotted lines nor blots
    inside = 1 - 2 * width / SIZE
    points = 0.5 + (points - 0.5) * inside[:, None, None, None]
    return ink(points, used, width, uniform(rng, (n,), 1.0, 2.2))
