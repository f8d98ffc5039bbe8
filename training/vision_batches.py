"""Batches of the second training stage: similarity as before, and scenes, sums, names and digits to
read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.tasks.attributes import render_scenes, sample_values
from bottega.tasks.glyphs import NAMES, render_named_glyphs
from bottega.tasks.handwriting import (
    chance,
    draw_characters,
    integers,
    join,
    paint,
    sample_alphabet,
    sample_mixed_styles,
    uniform,
)
from bottega.tasks.rules import render_rows, sample_rows
from training.concepts import NAME, ROW, SCENE, ConceptLabels
from training.image_batches import (
    TRAINING_JITTER,
    VIEWS,
    as_bytes,
    draw_digit_ink,
    sample_siblings,
    surface_images,
)
from training.real_characters import RealCharacters

FIGURES = 10
SURFACES, SURFACE_SIBLINGS = 12, 2
SCENES, SUMS = 48, 32


@dataclass(frozen=True)
class BatchMix:
    """Number of character classes in a batch, and how many are similar."""

    alphabets: int
    letters: int
    siblings: int
    real: RealCharacters | None = None

    @property
    def likeness(self) -> int:
        classes = self.alphabets * self.letters + self.siblings + FIGURES
        classes += self.real.classes if self.real else 0
        return (classes + SURFACES + SURFACE_SIBLINGS) * VIEWS

    @property
    def images(self) -> int:
        return self.likeness + SCENES + SUMS + len(NAMES)


FIRST_MIX = BatchMix(alphabets=3, letters=12, siblings=8)
SECOND_MIX = BatchMix(alphabets=2, letters=20, siblings=10)  # more letters that one could confuse


@dataclass
class VisionBatch:
    """One batch: the first `likeness` images come in runs of VIEWS per class, the others have
    labels.
    """

    images: Tensor  # (n, 3, 64, 64) uint8
    likeness: int
    scenes: ConceptLabels
    sums: ConceptLabels
    names: ConceptLabels


def sample_batch(mix: BatchMix, rng: torch.Generator) -> Tensor:
    """Return a batch as one flat byte array for the queue; `unpack` inverts it."""
    scenes = sample_values(rng, SCENES, held_out=False)
    sums = sample_rows(rng, SUMS, held_out=False)
    names = torch.arange(len(NAMES))
    images = torch.cat(
        [
            *([mix.real.sample(rng)] if mix.real else []),
            _written(rng, mix),
            surface_images(rng, SURFACES, SURFACE_SIBLINGS),
            render_scenes(rng, scenes),
            render_rows(rng, sums),
            render_named_glyphs(rng, names, jitter=TRAINING_JITTER),
        ]
    )
    values = torch.cat([scenes.flatten(), sums.flatten()]).to(torch.uint8)
    return torch.cat([as_bytes(images).flatten(), values])


def unpack(flat: Tensor, mix: BatchMix) -> VisionBatch:
    images, scenes, sums = torch.split(flat, [mix.images * 3 * 64 * 64, SCENES * 5, SUMS * 3])
    left, symbol, right = sums.view(SUMS, 3).long().unbind(1)
    return VisionBatch(
        images=images.view(mix.images, 3, 64, 64),
        likeness=mix.likeness,
        scenes=ConceptLabels(range(SCENE.start, SCENE.stop), scenes.view(SCENES, 5).long()),
        sums=ConceptLabels(range(ROW.start, ROW.stop), torch.stack([symbol, left, right], dim=1)),
        names=ConceptLabels(range(NAME, NAME + 1), torch.arange(len(NAMES))[:, None]),
    )


def _written(rng: torch.Generator, mix: BatchMix) -> Tensor:
    """Return characters of a few alphabets, some near-copies, and the ten digits as another
    alphabet.
    """
    letters = join([sample_alphabet(rng, mix.letters) for _ in range(mix.alphabets)])
    group = torch.arange(mix.alphabets).repeat_interleave(mix.letters)
    parents = torch.randperm(len(letters), generator=rng)[: mix.siblings]
    letters = join([letters, sample_siblings(rng, letters.rows(parents))])
    group = torch.cat([group, group[parents]])
    rows = torch.arange(len(letters)).repeat_interleave(VIEWS)
    digits = torch.arange(FIGURES).repeat_interleave(VIEWS)
    style = sample_mixed_styles(rng, torch.cat([group[rows], digits * 0 + mix.alphabets]))
    # Figures are often seen as coarse sensors see them, in the same style for all ten.
    coarse = chance(rng, (1,), 0.5).expand(len(digits))
    resolution = style.resolution[len(rows) :]
    style.resolution[len(rows) :] = torch.where(coarse, 3 + integers(rng, 2, (1,)), resolution)
    thick = uniform(rng, (len(digits),), 1.1, 2.2)
    style.boldness[len(rows) :] = torch.where(coarse, thick, style.boldness[len(rows) :])
    first, last = style.rows(torch.arange(len(rows))), torch.arange(len(rows), len(style.noise))
    generated = draw_characters(
        rng, letters.rows(rows), first.boldness, first.fill, jitter=TRAINING_JITTER
    )
    coarse_style = style.rows(last)
    more = draw_digit_ink(rng, digits, coarse_style.boldness, coarse_style.fill)
    return paint(rng, torch.cat([generated, more]), style)
