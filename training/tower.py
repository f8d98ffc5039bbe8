"""Vision tower: a small ResNet with a projector, trained to embed a class close together."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetModel

from training.image_batches import CLASSES, VIEWS, HeldOut, draw_batch, held_out, in_background

EMBEDDING = 80
HIDDEN = 256
FEATURES = 160
TEMPERATURE = 0.1
TRAIN_SEED, HELD_OUT_SEED, CENTRE_SEED = 1, 777, 5

VISION_CONFIG: dict[str, Any] = {
    "num_channels": 3,
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 96, 128, FEATURES],
    "depths": [1, 2, 2, 1, 1],
    "layer_type": "basic",
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
}


class Tower(nn.Module):
    """Vision tower from (n, 3, 64, 64) uint8 images to embeddings (n, EMBEDDING), not
    normalized."""

    def __init__(self) -> None:
        super().__init__()
        make: Any = ResNetModel  # untyped
        self.vision = make(ResNetConfig(**VISION_CONFIG))
        self.vision.to(memory_format=torch.channels_last)
        self.linear_1 = nn.Linear(FEATURES, HIDDEN)
        self.linear_2 = nn.Linear(HIDDEN, EMBEDDING)

    def hidden(self, images: Tensor) -> Tensor:
        pixels = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        features = self.vision(pixels).last_hidden_state.flatten(1)
        return F.gelu(self.linear_1(features))

    def forward(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.linear_2(self.hidden(images))
        return embedding


def contrastive_loss(embedding: Tensor) -> Tensor:
    """Return the supervised contrastive loss; rows come in runs of VIEWS images of one class."""
    unit = F.normalize(embedding, dim=-1)
    label = torch.arange(len(unit)) // VIEWS
    itself = torch.eye(len(unit), dtype=torch.bool)
    same = (label[:, None] == label[None]) & ~itself
    log_p = (unit @ unit.T / TEMPERATURE).masked_fill(itself, -1e9).log_softmax(dim=1)
    return -(log_p * same).sum(1).div(VIEWS - 1).mean()


@torch.no_grad()
def embed(tower: Tower, images: Tensor) -> Tensor:
    """Return unit embeddings of (..., 3, 64, 64) images, in evaluation mode."""
    training = tower.training
    tower.eval()
    rows = [F.normalize(tower(part), dim=-1) for part in torch.split(images.flatten(0, -4), 200)]
    tower.train(training)
    return torch.cat(rows).view(*images.shape[:-3], EMBEDDING)


def one_shot_accuracy(tower: Tower, tasks: Tensor) -> float:
    """Return the share of second views whose nearest first view has their class."""
    unit = embed(tower, tasks)
    nearest = (unit[:, :, 1] @ unit[:, :, 0].transpose(1, 2)).argmax(-1)
    return (nearest == torch.arange(nearest.shape[1])).float().mean().item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 50)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train_tower(out: Path, steps: int, peak: float = 2e-3) -> Tower:
    torch.manual_seed(0)
    tower = Tower()
    optimizer = torch.optim.AdamW(tower.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    validation = held_out(HELD_OUT_SEED)
    started, losses = time.monotonic(), []
    for step, batch in enumerate(in_background(draw_batch, TRAIN_SEED, steps)):
        assert len(batch) == CLASSES * VIEWS
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = contrastive_loss(tower(batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            _report(tower, validation, step + 1, time.monotonic() - started, losses[-100:])
            torch.save(tower.state_dict(), out)
    return tower.eval()


def _report(
    tower: Tower, validation: HeldOut, step: int, seconds: float, losses: list[float]
) -> None:
    figures = {name: one_shot_accuracy(tower, tasks) for name, tasks in vars(validation).items()}
    shown = " ".join(f"{name} {figure:.3f}" for name, figure in figures.items())
    mean = sum(losses) / len(losses)
    clock = f"{seconds / 60:.1f} min"
    print(f"step {step} {clock} loss {mean:.3f} 20-way one-shot: {shown}", flush=True)


def load_tower(path: Path) -> Tower:
    tower = Tower()
    tower.load_state_dict(torch.load(path, weights_only=True))
    return tower.eval()


@torch.no_grad()
def centre_and_size(tower: Tower, batches: int = 4) -> tuple[Tensor, float]:
    """Return the mean embedding, and the mean distance from it."""
    rng = torch.Generator().manual_seed(CENTRE_SEED)
    embeddings = torch.cat([tower(draw_batch(rng)) for _ in range(batches)])
    centre = embeddings.mean(0)
    return centre, (embeddings - centre).norm(dim=1).mean().item()
