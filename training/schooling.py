"""The eye's second school: it keeps practising likeness and learns to read scenes and sums."""

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
    Read,
    agreement_loss,
    reading_accuracy,
    reading_loss,
    silence_loss,
)
from training.lessons import SCENES, SUMS, Lesson, Mix, draw_lesson, unpack
from training.pictures import as_bytes, held_out, in_background
from training.tower import EMBEDDING, HELD_OUT_SEED, Tower, contrastive_loss, one_shot_accuracy

JUDGE_SEED = 778
SAVE_EVERY = 100


class Eye(nn.Module):
    """A tower that also reads: (n, 3, 64, 64) uint8 to (n, EMBEDDING + concepts)."""

    def __init__(self, tower: Tower, concepts: int = CONCEPTS) -> None:
        super().__init__()
        self.tower = tower
        self.reading = nn.Linear(tower.linear_2.in_features, concepts)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.tower.hidden(pictures)
        return torch.cat([self.tower.linear_2(hidden), self.reading(hidden)], dim=1)


def lesson_loss(output: Tensor, lesson: Lesson) -> tuple[Tensor, dict[str, float]]:
    """The sum of everything that is practised, and its terms."""
    embedding, concepts = torch.split(output, [EMBEDDING, CONCEPTS], dim=1)
    unit = F.normalize(embedding, dim=-1)
    start, end = lesson.likeness + SCENES, lesson.likeness + SCENES + SUMS
    likeness, scenes = slice(0, lesson.likeness), slice(lesson.likeness, start)
    sums, names = slice(start, end), slice(end, None)
    terms = {
        "likeness": contrastive_loss(embedding[likeness]),
        "scenes": reading_loss(concepts[scenes], lesson.scenes),
        "sums": reading_loss(concepts[sums], lesson.sums),
        "names": reading_loss(concepts[names], lesson.names),
        "silence": silence_loss(concepts[:end], range(NAME, NAME + 1))
        + silence_loss(torch.cat([concepts[likeness], concepts[start:]]), lesson.scenes.parts)
        + silence_loss(torch.cat([concepts[:start], concepts[end:]]), lesson.sums.parts),
        "agreement": 4 * agreement_loss(unit[scenes], lesson.scenes.values)
        + 2 * agreement_loss(unit[sums], lesson.sums.values),
        # The decoder takes likeness as a plain dot product: lengths must not differ much.
        "length": 0.3 * (embedding.norm(dim=1) - 1).square().mean(),
    }
    return torch.stack(list(terms.values())).sum(), {k: v.item() for k, v in terms.items()}


@dataclass
class Judge:
    """Pictures that training does not draw: other shape-colour pairs, other pairs of numbers."""

    scenes: Tensor
    sums: Tensor
    names: Tensor
    read: tuple[Read, Read, Read]


def draw_judge(seed: int, n: int = 480) -> Judge:
    rng = torch.Generator().manual_seed(seed)
    scenes, sums = sample_values(rng, n, held_out=True), sample_rows(rng, n, held_out=True)
    names = torch.arange(len(NAMES)).repeat(n // len(NAMES))
    reads = (
        Read(range(SCENE.start, SCENE.stop), scenes),
        Read(range(ROW.start, ROW.stop), sums[:, [1, 0, 2]]),
        Read(range(NAME, NAME + 1), names[:, None]),
    )
    return Judge(
        as_bytes(render_scenes(rng, scenes)),
        as_bytes(render_rows(rng, sums)),
        as_bytes(render_named_glyphs(rng, names)),
        reads,
    )


@torch.no_grad()
def report(eye: Eye, judge: Judge) -> str:
    eye.eval()
    shown = []
    for pictures, read in zip((judge.scenes, judge.sums, judge.names), judge.read, strict=True):
        concepts = torch.cat([eye(part)[:, EMBEDDING:] for part in torch.split(pictures, 160)])
        shown.append("/".join(f"{a:.3f}" for a in reading_accuracy(concepts, read)))
    eye.train()
    return f"scenes {shown[0]} sums {shown[1]} names {shown[2]}"


@dataclass(frozen=True)
class Term:
    """One term at school: batches of `mix` by `seed`, the learning rate falling from `peak`."""

    mix: Mix
    seed: int
    peak: float


def learning_rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def train_eye(eye: Eye, out: Path, steps: int, term: Term) -> Eye:
    """Goes on from `out` if it was interrupted; the batches are drawn again to the same place."""
    eye.train()
    optimizer = torch.optim.AdamW(
        eye.parameters(), lr=term.peak, betas=(0.9, 0.98), weight_decay=0.05
    )
    done = _resume(out, eye, optimizer)
    judge, likeness = draw_judge(JUDGE_SEED), held_out(HELD_OUT_SEED)
    began, losses = time.monotonic(), []
    for step, flat in enumerate(in_background(partial(draw_lesson, term.mix), term.seed, steps)):
        if step < done:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, term.peak)
        lesson = unpack(flat, term.mix)
        loss, terms = lesson_loss(eye(lesson.pictures), lesson)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        losses.append(terms)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            minutes = (time.monotonic() - began) / 60
            mean = {k: sum(t[k] for t in losses[-100:]) / len(losses[-100:]) for k in terms}
            print(f"step {step + 1} {minutes:.1f} min", _shown(mean), flush=True)
            near = {k: one_shot_accuracy(eye.tower, v) for k, v in vars(likeness).items()}
            print("   ", report(eye, judge), _shown(near), flush=True)
            state = {"eye": eye.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, out)
    return eye.eval()


def _shown(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {figure:.3f}" for name, figure in figures.items())


def _resume(out: Path, eye: Eye, optimizer: torch.optim.Optimizer) -> int:
    if not out.exists():
        return 0
    state: dict[str, Any] = torch.load(out, weights_only=True)
    eye.load_state_dict(state["eye"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def load_eye(path: Path) -> Eye:
    eye = Eye(Tower())
    eye.load_state_dict(torch.load(path, weights_only=True)["eye"])
    return eye.eval()
