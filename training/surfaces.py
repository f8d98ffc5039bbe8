"""Coloured things that are not writing: blobs, textures, rows of objects and ground layouts.

A class fixes palette, grain, pattern and layout; each image is a new piece of that surface,
seen from another angle and in another light. None of it is a photograph; it teaches the tower
that colour, grain and arrangement can matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from bottega.tasks.handwriting import chance, expose, integers, normal, sign, uniform

SIZE = 64
HARMONICS = 6
WAVES = 14


@dataclass
class SurfaceBatch:
    """One class a row. Lengths are in fractions of the frame, angles in radians."""

    palette: Tensor  # (n, 4, 3) ground, grain, objects, band
    pitch: Tensor  # (n,) cycles across the frame
    spread: Tensor  # (n,) octaves around the pitch
    grain_angle: Tensor  # (n,)
    grain_fan: Tensor  # (n,) how far directions scatter
    contrast: Tensor  # (n,) steepness of the grain
    has_grain: Tensor  # (n,) bool
    has_objects: Tensor  # (n,) bool
    cell: Tensor  # (n, 2) spacing of objects
    extent: Tensor  # (n, 2) their share of a cell
    round: Tensor  # (n,) bool: ellipses rather than rectangles
    fill: Tensor  # (n,) share of cells in use
    wobble: Tensor  # (n,) displacement in cells
    has_band: Tensor  # (n,) bool
    band: Tensor  # (n,) half width; above 1 one side is all band, as at a coast
    bend: Tensor  # (n,) curviness
    has_blob: Tensor  # (n,) bool
    outline: Tensor  # (n, HARMONICS, 2) amplitude and phase
    upright: Tensor  # (n,) bool: seen at a fixed angle

    def __len__(self) -> int:
        return len(self.pitch)

    def rows(self, index: Tensor) -> SurfaceBatch:
        return SurfaceBatch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def sample_surfaces(rng: torch.Generator, n: int) -> SurfaceBatch:
    # Muted: shades of one greyish colour, as of ground seen from above.
    grey = uniform(rng, (n, 1, 1), 0.15, 0.85) + normal(rng, (n, 4, 1), 0.2)
    muted = grey + normal(rng, (n, 1, 3), 0.08) + normal(rng, (n, 4, 3), 0.06)
    vivid = uniform(rng, (n, 4, 3))
    palette = torch.where(chance(rng, (n, 1, 1), 0.6), muted, vivid)
    kind = uniform(rng, (n,))
    amplitude = normal(rng, (n, HARMONICS)) * 0.32
    amplitude = amplitude / torch.arange(1, HARMONICS + 1) ** 0.8
    phase = uniform(rng, (n, HARMONICS), 0, 2 * math.pi)
    return SurfaceBatch(
        palette=palette.clamp(0, 1),
        pitch=uniform(rng, (n,), math.log(1.5), math.log(18)).exp(),
        spread=uniform(rng, (n,), 0.05, 0.9),
        grain_angle=uniform(rng, (n,), 0, math.pi),
        grain_fan=torch.where(chance(rng, (n,), 0.5), 3.2, uniform(rng, (n,), 0.02, 0.5)),
        contrast=uniform(rng, (n,), 0.6, 6.0),
        has_grain=chance(rng, (n,), 0.85),
        has_objects=(kind > 0.35) & (kind < 0.75),
        cell=uniform(rng, (n, 1), 0.08, 0.38) * uniform(rng, (n, 2), 0.7, 1.5),
        extent=uniform(rng, (n, 2), 0.35, 0.9),
        round=chance(rng, (n,), 0.35),
        fill=uniform(rng, (n,), 0.35, 1.0),
        wobble=uniform(rng, (n,), 0.0, 0.25),
        has_band=chance(rng, (n,), 0.4),
        band=torch.where(chance(rng, (n,), 0.4), 1.5, uniform(rng, (n,), 0.04, 0.2)),
        bend=uniform(rng, (n,), 0.0, 0.25),
        has_blob=kind > 0.75,
        outline=torch.stack([amplitude, phase], dim=-1),
        upright=chance(rng, (n,), 0.5),
    )


def sample_neighbours(rng: torch.Generator, parents: SurfaceBatch) -> SurfaceBatch:
    """The same classes with one thing changed: palette, grain, objects or outline."""
    n = len(parents)
    other, change = sample_surfaces(rng, n), integers(rng, 4, (n,))
    groups = (
        ("palette",),
        ("pitch", "grain_angle", "grain_fan", "contrast"),
        ("cell", "extent", "round", "has_objects"),
        ("outline", "band", "bend", "has_band"),
    )
    child = parents.rows(torch.arange(n))
    for index, names in enumerate(groups):
        for name in names:
            old, new = getattr(child, name), getattr(other, name)
            mask = (change == index).view(-1, *[1] * (old.ndim - 1))
            setattr(child, name, torch.where(mask, new, old))
    return child


def render_surfaces(rng: torch.Generator, surfaces: SurfaceBatch) -> Tensor:
    """Return one image of every row: (n, 3, SIZE, SIZE) in 0..1."""
    n = len(surfaces)
    view = _view(rng, surfaces)
    ground, grain, objects, band = surfaces.palette.unbind(dim=1)
    image = _blend(ground, grain, _grain(rng, surfaces, view))
    image = _over(image, objects, _objects(rng, surfaces, view))
    image = _over(image, band, _band(rng, surfaces, view))
    image = _over(image, objects, _blob(rng, surfaces, view))
    image = image.view(n, 3, SIZE, SIZE)
    image = soften(rng, relight(rng, image))
    return expose(rng, image, uniform(rng, (n,), 0.0, 0.05))


def _view(rng: torch.Generator, surfaces: SurfaceBatch) -> Tensor:
    """(n, SIZE * SIZE, 2) coordinates of the pixels on the surface, the centre at 0."""
    n = len(surfaces)
    axis = (torch.arange(SIZE) + 0.5) / SIZE - 0.5
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).view(1, -1, 2)
    tilt = normal(rng, (n,), 0.1)
    angle = torch.where(surfaces.upright, tilt, uniform(rng, (n,), 0, 2 * math.pi))
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], dim=1)
    return grid @ turn * normal(rng, (n, 1, 1), 0.15).exp()


def _grain(rng: torch.Generator, s: SurfaceBatch, view: Tensor) -> Tensor:
    """A sum of waves whose pitch and direction follow the class: (n, pixels) in 0..1."""
    n = len(s)
    pitch = s.pitch[:, None] * (normal(rng, (n, WAVES), 0.69) * s.spread[:, None]).exp()
    fan = uniform(rng, (n, WAVES), -0.5, 0.5) * s.grain_fan[:, None]
    angle = s.grain_angle[:, None] + fan
    wave = torch.stack([angle.cos(), angle.sin()], dim=-1) * pitch[..., None] * 2 * math.pi
    phase = uniform(rng, (n, 1, WAVES), 0, 2 * math.pi)
    height = torch.cos(view @ wave.transpose(1, 2) + phase).sum(-1) * (2 / WAVES) ** 0.5
    return torch.sigmoid(height * s.contrast[:, None]) * s.has_grain[:, None]


def _objects(rng: torch.Generator, s: SurfaceBatch, view: Tensor) -> Tensor:
    """Rows of rectangles or ellipses, some cells left empty: (n, pixels) in 0..1."""
    n, lattice = len(s), 16
    position = view / s.cell[:, None] + uniform(rng, (n, 1, 2), 0, lattice)
    index = position.floor().long() % lattice
    index = index[..., 0] * lattice + index[..., 1]
    shift = sign(rng, (n, lattice**2, 2)) * uniform(rng, (n, lattice**2, 2))
    shift = shift.gather(1, index[..., None].expand(-1, -1, 2)) * s.wobble[:, None, None]
    uniform(rng, (n, lattice**2))  # unused: keeps the random stream of the released model
    present = uniform(rng, (n, lattice**2)) < s.fill[:, None]
    local = (position - position.floor() - 0.5 + shift * 0.5).abs() * 2 / s.extent[:, None]
    distance = torch.where(s.round[:, None], local.norm(dim=-1), local.amax(-1))
    inside = torch.sigmoid((1 - distance) / 0.08)
    return inside * present.gather(1, index) * s.has_objects[:, None]


def _band(rng: torch.Generator, s: SurfaceBatch, view: Tensor) -> Tensor:
    """A road, river or shore across the frame: (n, pixels) in 0..1."""
    n = len(s)
    phase = uniform(rng, (n, 1), 0, 2 * math.pi)
    middle = torch.sin(view[..., 0] * 5 + phase) * s.bend[:, None] + normal(rng, (n, 1), 0.12)
    across = view[..., 1] - middle
    road = (s.band[:, None] - across.abs()) / 0.015
    edge = torch.where(s.band[:, None] > 1, across / 0.015, road)
    return torch.sigmoid(edge) * s.has_band[:, None]


def _blob(rng: torch.Generator, s: SurfaceBatch, view: Tensor) -> Tensor:
    """A closed outline with class harmonics: (n, pixels) in 0..1."""
    n = len(s)
    centred = view + normal(rng, (n, 1, 2), 0.04)
    angle = torch.atan2(centred[..., 1], centred[..., 0])
    amplitude = s.outline[..., 0] + normal(rng, (n, HARMONICS), 0.03)
    order = torch.arange(1, HARMONICS + 1)
    waves = torch.cos(angle[..., None] * order + s.outline[:, None, :, 1])
    radius = 0.27 * (1 + (waves * amplitude[:, None]).sum(-1)).clamp(0.25, 1.8)
    edge = torch.sigmoid((radius - centred.norm(dim=-1)) / 0.015)
    return edge * s.has_blob[:, None]


def _blend(ground: Tensor, over: Tensor, mask: Tensor) -> Tensor:
    return ground[:, :, None] + (over - ground)[:, :, None] * mask[:, None]


def _over(image: Tensor, colour: Tensor, mask: Tensor) -> Tensor:
    return image + (colour[:, :, None] - image) * mask[:, None]


def soften(rng: torch.Generator, images: Tensor, share: float = 0.4) -> Tensor:
    """Half resolution with coarse levels for a share of the images: the softness of a JPEG."""
    chosen = chance(rng, (len(images),), share).nonzero()[:, 0]
    if not len(chosen):
        return images
    small = F.avg_pool2d(images[chosen], 2)
    levels = uniform(rng, (len(chosen), 1, 1, 1), 12, 60)
    small = (small * levels).round() / levels
    out = images.clone()
    out[chosen] = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    return out


def relight(rng: torch.Generator, images: Tensor) -> Tensor:
    """Gain, gamma and a slight colour cast."""
    n = len(images)
    gamma = normal(rng, (n, 1, 1, 1), 0.18).exp()
    gain = normal(rng, (n, 1, 1, 1), 0.15).exp() * normal(rng, (n, 3, 1, 1), 0.05).exp()
    return (images.clamp(1e-4, 1) ** gamma * gain).clamp(0, 1)
