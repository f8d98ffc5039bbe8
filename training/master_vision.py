"""Vision of the master: continues from the apprentice's vision model and learns digits.

The digits are the first half of scikit-learn's set, in its order (898 of 1,797), and generated
digits. The second half is never used; most of its writers differ.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from bottega.tasks.handwriting import normal, paint, sample_mixed_styles, uniform
from training.concepts import CONCEPTS, DIGITS, SHARPNESS
from training.image_batches import as_bytes, draw_digit_ink, in_background
from training.tower import EMBEDDING, Tower
from training.vision import VisionReader, batch_loss, report, validation_images
from training.vision_batches import FIRST_MIX, sample_batch, unpack

TRAINED_DIGITS = 898  # of the digits; the rest is for tests
SEED, PEAK = 3, 6e-4
SCANNED, GENERATED = 48, 20
SIDE = 64


def first_half() -> tuple[Tensor, Tensor]:
    """Return images (TRAINED_DIGITS, 1, 8, 8) in 0..1 and classes (TRAINED_DIGITS,)."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images[:TRAINED_DIGITS]).float()[:, None] / 16
    return pixels, torch.from_numpy(digits.target[:TRAINED_DIGITS]).long()


def draw_digits(rng: torch.Generator, pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return shifted, rotated and stretched digits, and generated digits: image bytes and
    classes."""
    chosen = torch.randint(0, len(pixels), (SCANNED,), generator=rng)
    large = F.interpolate(pixels[chosen], size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    turn = torch.eye(2).repeat(SCANNED, 1, 1) + normal(rng, (SCANNED, 2, 2), 0.08)
    move = torch.cat([turn, uniform(rng, (SCANNED, 2, 1), -0.12, 0.12)], dim=2)
    moved = F.grid_sample(large, F.affine_grid(move, list(large.shape), False), align_corners=False)
    moved = (moved * uniform(rng, (SCANNED, 1, 1, 1), 0.8, 1.2)).clamp(0, 1).expand(-1, 3, -1, -1)
    generated = torch.randint(0, DIGITS, (GENERATED,), generator=rng)
    style = sample_mixed_styles(rng, torch.arange(GENERATED))
    figures = paint(rng, draw_digit_ink(rng, generated, style.boldness, style.fill), style)
    return as_bytes(torch.cat([moved, figures])), torch.cat([classes[chosen], generated])


def digit_loss(read: Tensor, classes: Tensor) -> Tensor:
    squared = (read - F.one_hot(classes, DIGITS)).square().sum(1).mean()
    return F.cross_entropy(SHARPNESS * read, classes) + squared


def train_master(vision: VisionReader, out: Path, steps: int) -> VisionReader:
    torch.manual_seed(2)
    master = VisionReader(vision.tower, CONCEPTS + DIGITS)
    with torch.no_grad():
        master.reading.weight[:CONCEPTS] = vision.reading.weight
        master.reading.bias[:CONCEPTS] = vision.reading.bias
    master.train()
    optimizer = torch.optim.AdamW(master.parameters(), lr=PEAK, weight_decay=0.05)
    rng, validation = torch.Generator().manual_seed(SEED), validation_images(SEED)
    pixels, classes = first_half()
    started, losses = time.monotonic(), []
    for step, flat in enumerate(in_background(partial(sample_batch, FIRST_MIX), SEED, steps)):
        for group in optimizer.param_groups:
            warm = min(1, (step + 1) / 30)
            group["lr"] = PEAK * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        batch = unpack(flat, FIRST_MIX)
        images, wanted = draw_digits(rng, pixels, classes)
        output = master(torch.cat([batch.images, images]))
        image_output, digits = torch.split(output, [len(batch.images), len(images)])
        loss, _ = batch_loss(image_output[:, : EMBEDDING + CONCEPTS], batch)
        extra = digit_loss(digits[:, EMBEDDING + CONCEPTS :], wanted)
        optimizer.zero_grad()
        torch.autograd.backward(loss + extra)
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        losses.append(extra.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes, mean = (time.monotonic() - started) / 60, sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1} {minutes:.1f} min digits {mean:.3f}", flush=True)
            print("   ", report(master, validation), flush=True)
    torch.save(master.state_dict(), out)
    return master.eval()


def load_master(path: Path) -> VisionReader:
    master = VisionReader(Tower(), CONCEPTS + DIGITS)
    master.load_state_dict(torch.load(path, weights_only=True))
    return master.eval()
