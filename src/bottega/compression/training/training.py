"""The loop that trains a compressor, and goes on where it was stopped."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bottega.compression.racc import Racc
from bottega.compression.training.checkpoints import Checkpoints
from bottega.compression.training.course import Course
from bottega.compression.training.lessons import Lesson, Lessons, scores_of
from bottega.compression.training.teaching import Teaching
from bottega.errors import SettingError


@dataclass(frozen=True)
class Progress:
    """After a step, the first being 0. `validation` where one was made."""

    step: int
    loss: float
    rate: float
    validation: float | None = None


def train(
    racc: Racc,
    teaching: Teaching,
    lessons: Lessons,
    course: Course,
    *,
    folder: Path | None = None,
    held_out: Sequence[Lesson] = (),
    report: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains in place. With `folder` it leaves checkpoints there and goes on from the last one: the
    losses are then those of a run that was never stopped. Raises `LoadError` for a checkpoint of
    another course or another shape, and `SettingError` once a loss or a gradient is no number: the
    weights are then those of the step before. Once `stopped` says so it keeps a checkpoint after
    the step and returns False.

    With `held_out` lessons and `course.validate_every` the best weights by their loss are what
    remains.
    """
    racc.to(teaching.hyper.device)
    optimizer = torch.optim.AdamW(
        racc.parameters(), lr=course.rate, weight_decay=course.weight_decay
    )
    checkpoints = Checkpoints(folder, course, racc, optimizer)
    state = checkpoints.restored()
    while state.step < course.steps and state.worse < course.patience:
        rate = course.rate_at(state.step)
        loss = _step(racc, teaching, lessons, course, optimizer, state.step, rate)
        validation = None
        if held_out and course.validate_every and (state.step + 1) % course.validate_every == 0:
            validation = _validated(racc, teaching, held_out, course)
            _finite(validation, "validation loss", state.step)
            state = checkpoints.validated(state, validation)
        report(Progress(state.step, loss, rate, validation))
        state = state.next()
        asked_to_stop = stopped() and state.step < course.steps
        if state.step % course.checkpoint_every == 0 or state.step == course.steps or asked_to_stop:
            checkpoints.keep(state)
        if asked_to_stop:
            return False
    checkpoints.restore_best()
    return True


def _step(
    racc: Racc,
    teaching: Teaching,
    lessons: Lessons,
    course: Course,
    optimizer: torch.optim.Optimizer,
    step: int,
    rate: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    total = 0.0
    for part in range(course.accumulate):
        number = step * course.accumulate + part
        batch = lessons(number)
        with _precision(course, teaching):
            loss = teaching.loss(racc, batch, course, _hidden(batch, course, number))
        torch.autograd.backward(loss / course.accumulate)
        total += _finite(loss.item(), "loss", step) / course.accumulate
    length = nn.utils.clip_grad_norm_(racc.parameters(), course.clip)
    _finite(length.item(), "gradient", step)
    optimizer.step()
    return total


def _finite(number: float, what: str, step: int) -> float:
    if not math.isfinite(number):
        raise SettingError(
            f"the {what} of step {step + 1} is {number}: training went astray",
            hint="begin in another folder with a lower rate, or weigh answer and cache less",
        )
    return number


def _hidden(batch: Sequence[Lesson], course: Course, number: int) -> Tensor:
    """The scores, those of a share of the lessons all alike."""
    lots = random.Random(f"{course.seed}:{number}")
    told = torch.tensor([[float(lots.random() >= course.flat)] for _ in batch])
    return scores_of(batch) * told


def _validated(racc: Racc, teaching: Teaching, held_out: Sequence[Lesson], course: Course) -> float:
    with torch.no_grad(), _precision(course, teaching):
        return teaching.loss(racc, held_out, course, scores_of(held_out)).item()


def _precision(course: Course, teaching: Teaching) -> AbstractContextManager[None]:
    if not course.half_precision:
        return nullcontext()
    kind = teaching.hyper.device.type
    autocast: AbstractContextManager[None] = torch.autocast(kind, torch.bfloat16)
    return autocast
