"""Images of real handwritten characters for training: `alphabet/character/image` folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from bottega._util.drawings import centred_drawing
from bottega.tasks.handwriting import (
    SIZE,
    chance,
    integers,
    normal,
    paint,
    sample_mixed_styles,
    uniform,
)
from training.image_batches import VIEWS

GROUPS, LETTERS = 2, 16  # alphabets in a batch, characters of each
LOADED = 96  # pixels a side
RENDERED = 2 * SIZE  # pixels a side before the average over 2 x 2
TURN, SHEAR, ASPECT, SCALE, SHIFT, BEND = 0.10, 0.12, 0.12, (0.75, 1.05), 0.03, 0.05
FULL_RESOLUTION = 0.75  # share of the groups


@dataclass
class RealCharacters:
    """Ink of characters: one (characters, writers, LOADED, LOADED) uint8 tensor per alphabet."""

    alphabets: list[Tensor]

    @property
    def classes(self) -> int:
        return GROUPS * LETTERS

    def sample(self, rng: torch.Generator) -> Tensor:
        """Return (classes * VIEWS, 3, SIZE, SIZE) in 0..1, the views of a character in sequence."""
        groups = [self._group(rng) for _ in range(GROUPS)]
        style = sample_mixed_styles(rng, torch.arange(GROUPS).repeat_interleave(LETTERS * VIEWS))
        fine = chance(rng, (GROUPS,), FULL_RESOLUTION).repeat_interleave(LETTERS * VIEWS)
        style.resolution[fine] = 0
        return paint(rng, render(rng, torch.cat(groups)), style)

    def _group(self, rng: torch.Generator) -> Tensor:
        """Return (LETTERS * VIEWS, LOADED, LOADED) of one alphabet. All are rotated or mirrored in
        the same way, which makes a new alphabet."""
        ink = self.alphabets[int(integers(rng, len(self.alphabets), ()))]
        letters = torch.randperm(len(ink), generator=rng)[:LETTERS]
        writers = torch.rand(LETTERS, ink.shape[1], generator=rng).argsort(1)[:, :VIEWS]
        images = ink[letters[:, None], writers].flatten(0, 1)
        images = images.rot90(int(integers(rng, 4, ())), (1, 2))
        return images.flip(2) if chance(rng, (), 0.5) else images


def render(rng: torch.Generator, ink: Tensor) -> Tensor:
    """Return ink (n, SIZE, SIZE) in 0..1 of (n, LOADED, LOADED) bytes, each with a random
    affine transform, bend and width of the pen."""
    n = len(ink)
    grid = F.affine_grid(_affine(rng, n), [n, 1, RENDERED, RENDERED], align_corners=False)
    bend = normal(rng, (n, 2, 4, 4), BEND / 2)
    bend = F.interpolate(bend, size=(RENDERED, RENDERED), mode="bicubic", align_corners=False)
    grid = grid + bend.permute(0, 2, 3, 1)
    rendered = F.grid_sample(ink[:, None].float() / 255, grid, align_corners=False)
    wide = chance(rng, (n, 1, 1, 1), 0.4)
    rendered = torch.where(wide, F.max_pool2d(rendered, 3, 1, 1), rendered)
    return F.avg_pool2d(rendered, 2)[:, 0]


def _affine(rng: torch.Generator, n: int) -> Tensor:
    turn, shear = normal(rng, (n,), TURN), normal(rng, (n,), SHEAR)
    wide = normal(rng, (n,), ASPECT / 2).exp()
    size = 1 / uniform(rng, (n,), *SCALE)
    cos, sin, shift = turn.cos() * size, turn.sin() * size, normal(rng, (n, 2), SHIFT)
    across = torch.stack([cos * wide, shear * cos - sin / wide, shift[:, 0]], 1)
    down = torch.stack([sin * wide, shear * sin + cos / wide, shift[:, 1]], 1)
    return torch.stack([across, down], 1)


def load_characters(folders: list[Path]) -> RealCharacters:
    """Load alphabets, one per folder, of equally many images of each character."""
    return RealCharacters([_alphabet(folder) for folder in folders])


def _alphabet(folder: Path) -> Tensor:
    characters = []
    for character in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(character.glob("*.png"))
        characters.append(np.stack([_ink(Image.open(file).convert("RGB")) for file in files]))
    return torch.from_numpy(np.stack(characters))


def _ink(image: Image.Image) -> NDArray[np.uint8]:
    square = centred_drawing(image).resize((LOADED, LOADED), Image.Resampling.BILINEAR)
    return np.asarray(square.convert("L"))
