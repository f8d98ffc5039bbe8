"""Handwritten characters: motor programs, rendering as ink, and the style of an image."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = Sequence[int]
STROKES = 5
VERTICES = 7
TURNS = VERTICES - 2
LINE, ARC, LOOP, CORNERS, WAVE, FREE = range(6)
SIZE = 64
SAMPLES = 48  # points along a stroke; a thin pen leaves no gaps
RESOLUTIONS = (64, 32, 16, 11, 8)
RESOLUTION_WEIGHTS = (0.34, 0.12, 0.16, 0.12, 0.26)
BOLD_BELOW = 16  # low resolutions need thick strokes


def uniform(rng: torch.Generator, shape: Shape, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) * (high - low) + low


def normal(rng: torch.Generator, shape: Shape, scale: float = 1.0) -> Tensor:
    return torch.randn(tuple(shape), generator=rng) * scale


def integers(rng: torch.Generator, high: int, shape: Shape) -> Tensor:
    return torch.randint(0, high, tuple(shape), generator=rng)


def chance(rng: torch.Generator, shape: Shape, probability: float) -> Tensor:
    return torch.rand(tuple(shape), generator=rng) < probability


def pick(rng: torch.Generator, weights: Sequence[float], count: int) -> Tensor:
    """Sample `count` indices in proportion to `weights`."""
    return torch.multinomial(torch.tensor(weights), count, replacement=True, generator=rng)


def sign(rng: torch.Generator, shape: Shape) -> Tensor:
    return torch.where(chance(rng, shape, 0.5), 1.0, -1.0)


@dataclass
class StrokeBatch:
    """Pen strokes in turtle coordinates, with any leading shape."""

    turns: Tensor  # (..., TURNS) radians between segments
    heading: Tensor  # (...) radians of the middle of the stroke
    length: Tensor  # (...)
    smooth: Tensor  # (...) 0 is angular, 1 curved
    pace: Tensor  # (..., VERTICES - 1) relative segment lengths


@dataclass
class MotorPrograms(StrokeBatch):
    """Characters as motor programs (Lake et al., 2015), one per row: strokes and their
    relations."""

    count: Tensor  # (n,) number of strokes
    vertex: Tensor  # (n, STROKES) own vertex that attaches
    host: Tensor  # (n, STROKES) index of the earlier stroke it attaches to
    host_vertex: Tensor  # (n, STROKES)
    offset: Tensor  # (n, STROKES, 2)

    def __len__(self) -> int:
        return len(self.count)

    def rows(self, index: Tensor) -> MotorPrograms:
        return MotorPrograms(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def join(parts: list[MotorPrograms]) -> MotorPrograms:
    return MotorPrograms(
        **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(MotorPrograms)}
    )


def sample_strokes(rng: torch.Generator, n: int) -> StrokeBatch:
    """Sample `n` primitive strokes: lines, arcs, loops, corners, waves and free curves."""
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
    return StrokeBatch(turns, heading, length, smooth, pace)


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


def sample_alphabet(
    rng: torch.Generator, n: int, library: int = 9, shared: float = 0.75
) -> MotorPrograms:
    """Sample `n` characters; a share `shared` of their strokes comes from `library` common
    strokes."""
    common, own = sample_strokes(rng, library), sample_strokes(rng, n * STROKES)
    use = chance(rng, (n, STROKES), shared)
    which = integers(rng, library, (n, STROKES))
    strokes = {}
    for name in (f.name for f in fields(StrokeBatch)):
        rest = getattr(own, name).unflatten(0, (n, STROKES))
        mask = use[..., None] if rest.ndim == 3 else use
        strokes[name] = torch.where(mask, getattr(common, name)[which], rest)
    quarter = (integers(rng, 3, (n, STROKES)) + 1) * math.pi / 2
    strokes["heading"] = strokes["heading"] + quarter * chance(rng, (n, STROKES), 0.25)
    mirrored = chance(rng, (n, STROKES, 1), 0.15)
    strokes["turns"] = torch.where(mirrored, -strokes["turns"], strokes["turns"])
    strokes["length"] = strokes["length"] * normal(rng, (n, STROKES), 0.15).exp()
    # The order of the arguments below is the order of the random numbers.
    logits = torch.tensor([0.17, 0.30, 0.27, 0.16, 0.10]).log() + normal(rng, (STROKES,), 0.4)
    vertices = torch.tensor([0, 0, 0, 3, 6, 6, 2, 4])
    apart = chance(rng, (n, STROKES, 1), 0.3)
    far = uniform(rng, (n, STROKES, 2), -0.6, 0.6)
    return MotorPrograms(
        **strokes,
        count=pick(rng, logits.softmax(0).tolist(), n) + 1,
        vertex=vertices[integers(rng, 8, (n, STROKES))],
        host=(uniform(rng, (n, STROKES)) * torch.arange(STROKES)).long(),
        host_vertex=vertices[integers(rng, 8, (n, STROKES))],
        offset=torch.where(apart, far, normal(rng, (n, STROKES, 2), 0.03)),
    )


@functools.cache
def _curves() -> tuple[Tensor, Tensor]:
    """Return two (SAMPLES, VERTICES) interpolators: straight segments and Catmull-Rom curves."""
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


def trace(rng: torch.Generator, programs: MotorPrograms, jitter: float) -> Tensor:
    """Run each program once with jitter: points (n, STROKES, SAMPLES, 2)."""
    n = len(programs)
    shake = jitter * normal(rng, (n, 1), 0.35).exp().clamp(0.3, 2.0)
    each = shake[..., None]
    scale = 1 + normal(rng, (n, STROKES, 1), 0.10) * each
    turns = programs.turns * scale + normal(rng, programs.turns.shape, 0.11) * each
    heading = programs.heading + normal(rng, (n, STROKES), 0.10) * shake
    length = programs.length * (normal(rng, (n, STROKES), 0.14) * shake).exp()
    pace = programs.pace * (normal(rng, programs.pace.shape, 0.15) * each).exp()
    # `heading` holds in the middle of a stroke: half of the extra turning goes to each end.
    surplus = turns.sum(-1, keepdim=True) - programs.turns.sum(-1, keepdim=True)
    bends = torch.cat([torch.zeros(n, STROKES, 1), turns.cumsum(-1)], dim=-1)
    angle = heading[..., None] + bends - surplus / 2
    step = pace / pace.sum(-1, keepdim=True) * length[..., None]
    moves = torch.stack([angle.cos() * step, angle.sin() * step], dim=-1)
    path = torch.cat([torch.zeros(n, STROKES, 1, 2), moves.cumsum(2)], dim=2)
    offset = programs.offset + normal(rng, programs.offset.shape, 0.035) * each
    # Attach each stroke to a vertex of an earlier one.
    row, placed = torch.arange(n), [path[:, 0]]
    for s in range(1, STROKES):
        hosts = torch.stack(placed, dim=1)
        target = hosts[row, programs.host[:, s], programs.host_vertex[:, s]] + offset[:, s]
        own = path[row, s, programs.vertex[:, s]]
        placed.append(path[:, s] + (target - own)[:, None])
    loose = uniform(rng, programs.smooth.shape, 0, 0.35) * (programs.smooth < 0.5)
    return pen_path(torch.stack(placed, dim=1), (programs.smooth + loose).clamp(0, 1))


def pen_path(vertices: Tensor, smooth: Tensor) -> Tensor:
    """Interpolate vertices (..., VERTICES, 2) to points (..., SAMPLES, 2). `smooth` (...) is 0 for
    straight segments and 1 for a curve through the vertices."""
    straight, curve = _curves()
    smooth = smooth[..., None, None]
    return (1 - smooth) * (straight @ vertices) + smooth * (curve @ vertices)


def frame(
    rng: torch.Generator, points: Tensor, used: Tensor, fill: Tensor, free: float, jitter: float
) -> Tensor:
    """Slant, warp and fit points to the unit square; their longer side is `fill` (n,). A share
    `free` of the drawings is smaller, at a random position."""
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
    is_free = chance(rng, (n, 1, 1), free)
    size = torch.where(is_free, uniform(rng, (n, 1, 1), 0.45, 0.95), fill[:, None, None])
    room = (1 - size) / 2 * uniform(rng, (n, 1, 2), -1, 1) * is_free
    return (flat * size + 0.5 + room + normal(rng, (n, 1, 2), 0.012)).view_as(points)


def _unit(points: Tensor, mask: Tensor) -> Tensor:
    """Centre the used points and scale their longer side to 1."""
    low = points.masked_fill(~mask, 9.0).amin(1, keepdim=True)
    high = points.masked_fill(~mask, -9.0).amax(1, keepdim=True)
    return (points - (low + high) / 2) / (high - low).amax(2, keepdim=True).clamp(min=0.1)


def ink(points: Tensor, used: Tensor, width: Tensor, pressure: Tensor) -> Tensor:
    """Render points as ink (n, SIZE, SIZE) in 0..1. `width` (n,) is the sigma of the pen in pixels.
    A Gaussian pen is separable, so one matrix product renders a character."""
    x = points * SIZE
    move = (x[:, :, 1:] - x[:, :, :-1]).norm(dim=-1)
    move = torch.cat([move, move[:, :, -1:]], dim=-1) * used[..., None]
    x, move, sigma = x.flatten(1, 2), move.flatten(1), width[:, None]
    grid = torch.arange(SIZE) + 0.5
    narrow = (-0.5 / sigma**2)[..., None]
    across = torch.exp((x[..., 0:1] - grid) ** 2 * narrow)
    down = torch.exp((x[..., 1:2] - grid) ** 2 * narrow) * (move / (sigma * 2.5066))[..., None]
    return (down.transpose(1, 2) @ across * pressure[:, None, None]).clamp(max=1.0)


def draw_characters(
    rng: torch.Generator,
    programs: MotorPrograms,
    boldness: Tensor,
    fill: Tensor,
    free: float = 0.15,
    jitter: float = 1.0,
) -> Tensor:
    """Draw one character per row: ink (n, SIZE, SIZE). `boldness` (n,) scales the pen width, `fill`
    (n,) is the share of the frame that a character takes, `free` is the share of characters at a
    random position, `jitter` scales the noise."""
    used = torch.arange(STROKES)[None] < programs.count[:, None]
    points = frame(rng, trace(rng, programs, jitter), used, fill, free, jitter)
    n = len(programs)
    width = normal(rng, (n,), 0.38).exp() * 0.0145 * SIZE * boldness
    width = width.clamp(0.5, 3.4)  # avoids dotted lines and blots
    inside = 1 - 2 * width / SIZE
    points = 0.5 + (points - 0.5) * inside[:, None, None, None]
    return ink(points, used, width, uniform(rng, (n,), 1.0, 2.2))


@dataclass
class ImageStyle:
    """Style parameters of a batch, one row per image, sampled for one image or for a group of
    classes. Within a group of one style the style carries no information, so a vision tower must
    use the shape; across groups it must ignore the style."""

    resolution: Tensor  # (n,) index into RESOLUTIONS
    upscale: Tensor  # (n,) 0 bilinear, 1 bicubic, 2 nearest
    boldness: Tensor  # (n,)
    ink: Tensor  # (n, 3)
    paper: Tensor  # (n, 3)
    noise: Tensor  # (n,)
    level: Tensor  # (n,) bool: contrast is stretched to the full range, as scanners do
    fill: Tensor  # (n,) share of the frame that a centred character fills

    def rows(self, index: Tensor) -> ImageStyle:
        return ImageStyle(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def sample_styles(rng: torch.Generator, n: int) -> ImageStyle:
    """Sample `n` independent styles."""
    resolution = pick(rng, RESOLUTION_WEIGHTS, n)
    coarse = torch.tensor(RESOLUTIONS)[resolution] <= BOLD_BELOW
    thick = uniform(rng, (n,), 1.1, 2.4)
    boldness = torch.where(coarse, thick, torch.where(chance(rng, (n,), 0.25), thick, 1.0))
    tight = chance(rng, (n,), 0.5) & coarse
    plain = chance(rng, (n, 1), 0.65)
    light = torch.where(plain, 1.0, uniform(rng, (n, 3), 0.5, 1.0))
    dark = torch.where(plain, 0.0, uniform(rng, (n, 3), 0.0, 0.4))
    inverted = chance(rng, (n, 1), 0.4)
    return ImageStyle(
        resolution=resolution,
        upscale=pick(rng, (0.45, 0.3, 0.25), n),
        boldness=boldness,
        ink=torch.where(inverted, dark, light),
        paper=torch.where(inverted, light, dark),
        noise=uniform(rng, (n,), 0.0, 0.06) * chance(rng, (n,), 0.7),
        level=chance(rng, (n,), 0.5),
        fill=torch.where(tight, uniform(rng, (n,), 0.95, 1.05), uniform(rng, (n,), 0.7, 1.0)),
    )


def crisp_style(n: int) -> ImageStyle:
    """Return `n` rows of white on black at full resolution, without noise."""
    zero, one, paper = torch.zeros(n), torch.ones(n), torch.zeros(n, 3)
    index = zero.long()
    return ImageStyle(index, index.clone(), one, 1 - paper, paper, zero, zero.bool(), 0.8 * one)


def sample_mixed_styles(rng: torch.Generator, group: Tensor, shared: float = 0.85) -> ImageStyle:
    """Sample one style per image; with probability `shared` it is the style of the image's group.
    `group` (n,) holds the group index of each image."""
    n, groups = len(group), int(group.max()) + 1
    own, common = sample_styles(rng, n), sample_styles(rng, groups)
    is_shared = chance(rng, (groups,), shared)[group]
    merged = {}
    for field in fields(ImageStyle):
        a, b = getattr(common, field.name)[group], getattr(own, field.name)
        merged[field.name] = torch.where(is_shared[:, None] if a.ndim == 2 else is_shared, a, b)
    return ImageStyle(**merged)


def coarsen(images: Tensor, resolution: Tensor, upscale: Tensor) -> Tensor:
    """Reduce images (n, c, s, s) to their resolution and scale them back to s x s."""
    out, size = images.clone(), images.shape[-1]
    for level, side in enumerate(RESOLUTIONS):
        for mode, name in enumerate(("bilinear", "bicubic", "nearest")):
            chosen = ((resolution == level) & (upscale == mode)).nonzero()[:, 0]
            if side == size or not len(chosen):
                continue
            small = F.adaptive_avg_pool2d(images[chosen], side)
            aligned = {} if name == "nearest" else {"align_corners": False}
            out[chosen] = F.interpolate(small, size=(size, size), mode=name, **aligned)
    return out.clamp(0, 1)


def paint(rng: torch.Generator, strokes: Tensor, style: ImageStyle) -> Tensor:
    """Colour ink (n, s, s) in its style: images (n, 3, s, s) in 0..1."""
    mask = coarsen(strokes[:, None], style.resolution, style.upscale)
    peak = mask.amax((1, 2, 3), keepdim=True).clamp(min=0.1)
    mask = torch.where(style.level[:, None, None, None], mask / peak, mask)
    mask = (mask * uniform(rng, (len(mask), 1, 1, 1), 0.75, 1.25)).clamp(0, 1)
    ink, paper = style.ink[:, :, None, None], style.paper[:, :, None, None]
    return expose(rng, paper + (ink - paper) * mask, style.noise)


def expose(rng: torch.Generator, images: Tensor, noise: Tensor) -> Tensor:
    """Add sensor noise; half of the images have the same noise in all channels."""
    n, channels, height, width = images.shape
    grain = normal(rng, (n, channels, height, width))
    grain = torch.where(chance(rng, (n, 1, 1, 1), 0.5), grain[:, :1], grain)
    return (images + grain * noise[:, None, None, None]).clamp(0, 1)
