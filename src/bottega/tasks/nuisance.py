"""Nuisance variation of images: resolution, polarity, ink colour, contrast and noise.

An `ImageStyle` is sampled for a group of classes or for a single image. Within a group of one style
the style carries no information, so a vision tower must use the shape; across groups it must ignore
the style.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from bottega.tasks.handwriting import chance, normal, pick, uniform

RESOLUTIONS = (64, 32, 16, 11, 8)
RESOLUTION_WEIGHTS = (0.34, 0.12, 0.16, 0.12, 0.26)
BOLD_BELOW = 16  # low resolutions need thick strokes


@dataclass
class ImageStyle:
    """Style parameters of a batch, one row per image."""

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
