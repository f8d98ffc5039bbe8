"""Batches of labelled images for the vision tower, and held-out classes for validation."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing

from bottega.tasks.handwriting import (
    SIZE,
    STROKES,
    TURNS,
    VERTICES,
    ImageStyle,
    MotorPrograms,
    StrokeBatch,
    crisp_style,
    draw_characters,
    ink,
    integers,
    join,
    normal,
    paint,
    sample_alphabet,
    sample_mixed_styles,
    sample_strokes,
    sign,
    uniform,
)
from bottega.tasks.rules import sketch
from training.surfaces import render_surfaces, sample_neighbours, sample_surfaces

ImageArray = NDArray[np.uint8]
VIEWS = 4  # images of a class in a batch
ALPHABETS, LETTERS = 3, 12
GLYPH_SIBLINGS = 10
SURFACES, SURFACE_SIBLINGS = 14, 4
CLASSES = ALPHABETS * LETTERS + GLYPH_SIBLINGS + SURFACES + SURFACE_SIBLINGS
TRAINING_JITTER = 1.2  # strokes vary more in training than in validation
COLOURED = 4  # glyph classes whose colour belongs to the class


def draw_batch(rng: torch.Generator) -> Tensor:
    """Return (CLASSES * VIEWS, 3, 64, 64) uint8, the VIEWS images of a class in sequence."""
    images = torch.cat([_glyph_images(rng), surface_images(rng, SURFACES, SURFACE_SIBLINGS)])
    return as_bytes(images)


def _glyph_images(rng: torch.Generator) -> Tensor:
    letters = join([sample_alphabet(rng, LETTERS) for _ in range(ALPHABETS)])
    group = torch.arange(ALPHABETS).repeat_interleave(LETTERS)
    parents = torch.randperm(len(letters), generator=rng)[:GLYPH_SIBLINGS]
    letters = join([letters, sample_siblings(rng, letters.rows(parents))])
    group = torch.cat([group, group[parents]])
    rows = torch.arange(len(letters)).repeat_interleave(VIEWS)
    style = sample_mixed_styles(rng, group[rows])
    tinted = uniform(rng, (COLOURED, 3)).repeat_interleave(VIEWS, 0)
    style.ink[: COLOURED * VIEWS] = (tinted + normal(rng, tinted.shape, 0.05)).clamp(0, 1)
    generated = draw_characters(
        rng, letters.rows(rows), style.boldness, style.fill, jitter=TRAINING_JITTER
    )
    return paint(rng, generated, style)


def surface_images(rng: torch.Generator, classes: int, near: int) -> Tensor:
    """Return VIEWS images of each of `classes` surfaces and of `near` variants of the first
    ones."""
    surfaces = sample_surfaces(rng, classes)
    variants = sample_neighbours(rng, surfaces.rows(torch.arange(near)))
    each = torch.arange(classes).repeat_interleave(VIEWS)
    close = torch.arange(near).repeat_interleave(VIEWS)
    return torch.cat(
        [render_surfaces(rng, surfaces.rows(each)), render_surfaces(rng, variants.rows(close))]
    )


@dataclass
class HeldOut:
    """One-shot tasks: (tasks, classes, views, 3, 64, 64) uint8."""

    crisp: Tensor  # glyphs in white on black at full resolution
    glyphs: Tensor  # glyphs in any style, one style a task
    surfaces: Tensor


def held_out(seed: int, tasks: int = 20, ways: int = 20, views: int = 2) -> HeldOut:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.arange(ways).repeat_interleave(views)
    generated: dict[str, list[Tensor]] = {"crisp": [], "glyphs": [], "surfaces": []}
    for _ in range(tasks):
        letters = sample_alphabet(rng, ways).rows(rows)
        style = sample_mixed_styles(rng, torch.zeros(len(rows), dtype=torch.long), shared=1.0)
        generated["glyphs"].append(_render_glyphs(rng, letters, style))
        generated["crisp"].append(_render_glyphs(rng, letters, crisp_style(len(rows))))
        generated["surfaces"].append(render_surfaces(rng, sample_surfaces(rng, ways).rows(rows)))
    shape = (tasks, ways, views, 3, 64, 64)
    return HeldOut(**{name: as_bytes(torch.stack(x)).view(shape) for name, x in generated.items()})


def _render_glyphs(rng: torch.Generator, letters: MotorPrograms, style: ImageStyle) -> Tensor:
    return paint(rng, draw_characters(rng, letters, style.boldness, style.fill, free=0.0), style)


def as_bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def _fill(
    buffer: multiprocessing.Queue[ImageArray], seed: int, steps: int, make: Callable[..., Tensor]
) -> None:
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        # As an array, a batch outlives this process; a tensor would be shared memory that dies.
        buffer.put(make(rng).numpy())


def in_background(
    make: Callable[[torch.Generator], Tensor], seed: int, steps: int
) -> Iterator[Tensor]:
    """Yield `steps` batches that a worker process prepares ahead; equal seeds give equal
    batches."""
    context = multiprocessing.get_context("spawn")
    buffer = context.Queue(maxsize=8)
    worker = context.Process(target=_fill, args=(buffer, seed, steps, make), daemon=True)
    worker.start()
    for _ in range(steps):
        while True:
            try:
                yield torch.from_numpy(buffer.get(timeout=5))
                break
            except queue.Empty:
                if not worker.is_alive():
                    raise RuntimeError("the rendering process ended early") from None
    worker.join()


def sample_siblings(rng: torch.Generator, parents: MotorPrograms) -> MotorPrograms:
    """Return each parent after one edit: a stroke is replaced, added, dropped, moved, turned or
    mirrored."""
    n = len(parents)
    child = parents.rows(torch.arange(n))
    edit, row = integers(rng, 5, (n,)), torch.arange(n)
    stroke = (uniform(rng, (n,)) * child.count).long()
    new_strokes = sample_strokes(rng, n)
    for name in (f.name for f in fields(StrokeBatch)):
        old, new = getattr(child, name), getattr(new_strokes, name)
        mask = (edit == 0)[:, None] if new.ndim == 2 else edit == 0
        old[row, stroke] = torch.where(mask, new, old[row, stroke])
    grown = torch.where(child.count < STROKES, child.count + 1, child.count - 1)
    child.count = torch.where(edit == 1, grown, child.count)
    moved = (edit == 2) & (stroke > 0)
    vertex = child.host_vertex[row, stroke]
    child.host_vertex[row, stroke] = torch.where(moved, (vertex + 3) % VERTICES, vertex)
    turned = (edit == 3) | ((edit == 2) & (stroke == 0))
    swing = uniform(rng, (n,), 0.6, 2.6) * sign(rng, (n,))
    child.heading[row, stroke] += torch.where(turned, swing, 0.0)
    mirrored = edit == 4
    bent = child.turns[row, stroke]
    flipped = -bent + normal(rng, (n, TURNS), 0.15)
    child.turns[row, stroke] = torch.where(mirrored[:, None], flipped, bent)
    child.length[row, stroke] *= torch.where(mirrored, uniform(rng, (n,), 0.45, 0.75), 1.0)
    return child


def draw_digit_ink(
    rng: torch.Generator, kind: Tensor, boldness: Tensor, fill: Tensor, jitter: float = 1.2
) -> Tensor:
    """Return ink of single digits (n, SIZE, SIZE); `fill` (n,) is their share of the frame."""
    points, used = sketch(rng, kind, jitter)
    width = (normal(rng, (len(kind),), 0.3).exp() * 0.02 * SIZE * boldness).clamp(0.8, 4.0)
    room = (fill * (1 - 2 * width / SIZE))[:, None, None, None]
    return ink((points - 0.5) * room + 0.5, used, width, uniform(rng, (len(kind),), 1.0, 2.2))
