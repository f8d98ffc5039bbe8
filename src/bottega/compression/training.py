"""Training loop of a compressor, with atomic checkpoints that resume only the same run."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bottega.compression.model import RaccModel
from bottega.compression.objective import (
    TrainingBatches,
    TrainingConfig,
    TrainingExample,
    TrainingObjective,
    retrieval_scores,
)
from bottega.errors import LoadError, SettingError

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class TrainingState:
    """Progress that a checkpoint stores: the next `step`, the `best` validation loss, and the
    number of validations since (`worse`)."""

    step: int = 0
    best: float = math.inf
    worse: int = 0

    def next(self) -> TrainingState:
        return replace(self, step=self.step + 1)


class CheckpointFile:
    """Checkpoint in one file, replaced atomically. Without a folder it keeps only the best
    weights."""

    def __init__(
        self,
        folder: Path | None,
        config: TrainingConfig,
        racc: RaccModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._path = folder / CHECKPOINT if folder else None
        self._racc, self._optimizer = racc, optimizer
        self._best: dict[str, torch.Tensor] | None = None
        self._of = json.dumps({"course": asdict(config), "shape": asdict(racc.config)})

    def restore(self) -> TrainingState:
        if self._path is None or not self._path.exists():
            return TrainingState()
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for a damaged file
            raise LoadError(
                f"{self._path} cannot be read: {error}", hint="delete it to train from the start"
            ) from error
        if saved["of"] != self._of:
            raise LoadError(
                f"{self._path} was written with other settings",
                hint="use another folder, or the settings of that run",
            )
        self._racc.load_state_dict(saved["weights"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._best = saved["best_weights"]
        return TrainingState(**saved["state"])

    def validated(self, state: TrainingState, loss: float) -> TrainingState:
        if loss < state.best:
            self._best = {name: one.clone() for name, one in self._racc.state_dict().items()}
            return replace(state, best=loss, worse=0)
        return replace(state, worse=state.worse + 1)

    def save(self, state: TrainingState) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        with unfinished.open("wb") as file:
            torch.save(
                {
                    "of": self._of,
                    "state": asdict(state),
                    "weights": self._racc.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "best_weights": self._best,
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._path)

    def restore_best(self) -> None:
        if self._best is not None:
            self._racc.load_state_dict(self._best)


@dataclass(frozen=True)
class TrainingProgress:
    """Report of one step, counted from 0. `validation` is None on steps without validation."""

    step: int
    loss: float
    rate: float
    validation: float | None = None


def train(
    racc: RaccModel,
    objective: TrainingObjective,
    batches: TrainingBatches,
    config: TrainingConfig,
    *,
    folder: Path | None = None,
    held_out: Sequence[TrainingExample] = (),
    report: Callable[[TrainingProgress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Train `racc` in place and return whether training finished.

    With `folder`, write checkpoints there and resume from the last one; the losses equal those of
    an uninterrupted run. With `held_out` examples and `config.validate_every`, keep the weights
    with the best validation loss. When `stopped()` is true, write a checkpoint after the step and
    return False.

    Raises `LoadError` for a checkpoint with other settings, and `SettingError` if a loss or
    gradient is not finite; the weights are then those of the step before.
    """
    racc.to(objective.hyper.device)
    optimizer = torch.optim.AdamW(
        racc.parameters(), lr=config.rate, weight_decay=config.weight_decay
    )
    checkpoints = CheckpointFile(folder, config, racc, optimizer)
    state = checkpoints.restore()
    while state.step < config.steps and state.worse < config.patience:
        rate = config.rate_at(state.step)
        loss = _step(racc, objective, batches, config, optimizer, state.step, rate)
        validation = None
        if held_out and config.validate_every and (state.step + 1) % config.validate_every == 0:
            validation = _validate(racc, objective, held_out, config)
            _finite(validation, "validation loss", state.step)
            state = checkpoints.validated(state, validation)
        report(TrainingProgress(state.step, loss, rate, validation))
        state = state.next()
        stopping = stopped() and state.step < config.steps
        if state.step % config.checkpoint_every == 0 or state.step == config.steps or stopping:
            checkpoints.save(state)
        if stopping:
            return False
    checkpoints.restore_best()
    return True


def _step(
    racc: RaccModel,
    objective: TrainingObjective,
    batches: TrainingBatches,
    config: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    step: int,
    rate: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    total = 0.0
    for part in range(config.accumulate):
        number = step * config.accumulate + part
        batch = batches(number)
        with _precision(config, objective):
            loss = objective.loss(racc, batch, config, _visible_scores(batch, config, number))
        torch.autograd.backward(loss / config.accumulate)
        total += _finite(loss.item(), "loss", step) / config.accumulate
    length = nn.utils.clip_grad_norm_(racc.parameters(), config.clip)
    _finite(length.item(), "gradient", step)
    optimizer.step()
    return total


def _finite(number: float, what: str, step: int) -> float:
    if not math.isfinite(number):
        raise SettingError(
            f"the {what} of step {step + 1} must be finite, got {number}",
            hint="start in another folder with a lower rate or smaller answer and cache weights",
        )
    return number


def _visible_scores(
    batch: Sequence[TrainingExample], config: TrainingConfig, number: int
) -> Tensor:
    """Return the scores, with those of a random share of the examples set to 0."""
    rng = random.Random(f"{config.seed}:{number}")
    visible = torch.tensor([[float(rng.random() >= config.flat)] for _ in batch])
    return retrieval_scores(batch) * visible


def _validate(
    racc: RaccModel,
    objective: TrainingObjective,
    held_out: Sequence[TrainingExample],
    config: TrainingConfig,
) -> float:
    with torch.no_grad(), _precision(config, objective):
        return objective.loss(racc, held_out, config, retrieval_scores(held_out)).item()


def _precision(
    config: TrainingConfig, objective: TrainingObjective
) -> AbstractContextManager[None]:
    if not config.half_precision:
        return nullcontext()
    kind = objective.hyper.device.type
    autocast: AbstractContextManager[None] = torch.autocast(kind, torch.bfloat16)
    return autocast
