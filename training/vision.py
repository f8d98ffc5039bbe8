"""Second training stage of the vision model: it keeps similarity and learns to read scenes and
sums.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bottega.tasks.attributes import render_scenes, sample_values
from bottega.tasks.glyphs import NAMES, render_named_glyphs
from bottega.tasks.rules import render_rows, sample_rows
from training.concepts import (
    CONCEPTS,
    NAME,
    ROW,
    SCENE,
    ConceptLabels,
    agreement_loss,
    reading_accuracy,
    reading_loss,
    silence_loss,
)
from training.image_batches import as_bytes, held_out, in_background
from training.tower import EMBEDDING, HELD_OUT_SEED, Tower, contrastive_loss, one_shot_accuracy
from training.vision_batches import SCENES, SUMS, BatchMix, VisionBatch, sample_batch, unpack

JUDGE_SEED = 778
SAVE_EVERY = 100


class VisionReader(nn.Module):
    """Tower with a concept reader: (n, 3, 64, 64) uint8 to (n, EMBEDDING + concepts)."""

    def __init__(self, tower: Tower, concepts: int = CONCEPTS) -> None:
        super().__init__()
        self.tower = tower
        self.reading = nn.Linear(tower.linear_2.in_features, concepts)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.tower.hidden(images)
        return torch.cat([self.tower.linear_2(hidden), self.reading(hidden)], dim=1)


def batch_loss(output: Tensor, batch: VisionBatch) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of all losses, and its terms."""
    embedding, concepts = torch.split(output, [EMBEDDING, CONCEPTS], dim=1)
    unit = F.normalize(embedding, dim=-1)
    start, end = batch.likeness + SCENES, batch.likeness + SCENES + SUMS
    likeness, scenes = slice(0, batch.likeness), slice(batch.likeness, start)
    sums, names = slice(start, end), slice(end, None)
    terms = {
        "likeness": contrastive_loss(embedding[likeness]),
        "scenes": reading_loss(concepts[scenes], batch.scenes),
        "sums": reading_loss(concepts[sums], batch.sums),
        "names": reading_loss(concepts[names], batch.names),
        "silence": silence_loss(concepts[:end], range(NAME, NAME + 1))
        + silence_loss(torch.cat([concepts[likeness], concepts[start:]]), batch.scenes.parts)
        + silence_loss(torch.cat([concepts[:start], concepts[end:]]), batch.sums.parts),
        "agreement": 4 * agreement_loss(unit[scenes], batch.scenes.values)
        + 2 * agreement_loss(unit[sums], batch.sums.values),
        # The decoder takes likeness as a plain dot product: lengths must not differ much.
        "length": 0.3 * (embedding.norm(dim=1) - 1).square().mean(),
    }
    return torch.stack(list(terms.values())).sum(), {k: v.item() for k, v in terms.items()}


@dataclass
class ValidationImages:
    """Images that training never generates: other shape-colour pairs, other pairs of numbers."""

    scenes: Tensor
    sums: Tensor
    names: Tensor
    read: tuple[ConceptLabels, ConceptLabels, ConceptLabels]


def validation_images(seed: int, n: int = 480) -> ValidationImages:
    rng = torch.Generator().manual_seed(seed)
    scenes, sums = sample_values(rng, n, held_out=True), sample_rows(rng, n, held_out=True)
    names = torch.arange(len(NAMES)).repeat(n // len(NAMES))
    reads = (
        ConceptLabels(range(SCENE.start, SCENE.stop), scenes),
        ConceptLabels(range(ROW.start, ROW.stop), sums[:, [1, 0, 2]]),
        ConceptLabels(range(NAME, NAME + 1), names[:, None]),
    )
    return ValidationImages(
        as_bytes(render_scenes(rng, scenes)),
        as_bytes(render_rows(rng, sums)),
        as_bytes(render_named_glyphs(rng, names)),
        reads,
    )


@torch.no_grad()
def report(vision: VisionReader, validation: ValidationImages) -> str:
    vision.eval()
    shown = []
    for images, read in zip(
        (validation.scenes, validation.sums, validation.names), validation.read, strict=True
    ):
        concepts = torch.cat([vision(part)[:, EMBEDDING:] for part in torch.split(images, 160)])
        shown.append("/".join(f"{a:.3f}" for a in reading_accuracy(concepts, read)))
    vision.train()
    return f"scenes {shown[0]} sums {shown[1]} names {shown[2]}"


@dataclass(frozen=True)
class TrainingPhase:
    """One phase: batches of `mix` by `seed`, with a learning rate that falls from `peak`."""

    mix: BatchMix
    seed: int
    peak: float


def learning_rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def train_vision(vision: VisionReader, out: Path, steps: int, phase: TrainingPhase) -> VisionReader:
    """Train the model. Resume from `out` after an interruption; earlier batches are generated again
    and skipped.
    """
    vision.train()
    optimizer = torch.optim.AdamW(
        vision.parameters(), lr=phase.peak, betas=(0.9, 0.98), weight_decay=0.05
    )
    done = _resume(out, vision, optimizer)
    validation, likeness = validation_images(JUDGE_SEED), held_out(HELD_OUT_SEED)
    started, losses = time.monotonic(), []
    for step, flat in enumerate(in_background(partial(sample_batch, phase.mix), phase.seed, steps)):
        if step < done:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, phase.peak)
        batch = unpack(flat, phase.mix)
        loss, terms = batch_loss(vision(batch.images), batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(vision.parameters(), 1.0)
        optimizer.step()
        losses.append(terms)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            mean = {k: sum(t[k] for t in losses[-100:]) / len(losses[-100:]) for k in terms}
            print(f"step {step + 1} {minutes:.1f} min", _shown(mean), flush=True)
            near = {k: one_shot_accuracy(vision.tower, v) for k, v in vars(likeness).items()}
            print("   ", report(vision, validation), _shown(near), flush=True)
            state = {
                "eye": vision.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, out)
    return vision.eval()


def _shown(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {figure:.3f}" for name, figure in figures.items())


def _resume(out: Path, vision: VisionReader, optimizer: torch.optim.Optimizer) -> int:
    if not out.exists():
        return 0
    state: dict[str, Any] = torch.load(out, weights_only=True)
    vision.load_state_dict(state["eye"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def load_vision(path: Path) -> VisionReader:
    vision = VisionReader(Tower())
    vision.load_state_dict(torch.load(path, weights_only=True)["eye"])
    return vision.eval()
