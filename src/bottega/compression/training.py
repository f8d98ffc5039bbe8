"""Checkpoints of training: whole or not there, and only for the run that wrote them."""

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

NAME = "checkpoint.pt"


@dataclass(frozen=True)
class TrainingState:
    """`step` is the next one to take, `worse` how many validations ago the best one was."""

    step: int = 0
    best: float = math.inf
    worse: int = 0

    def next(self) -> TrainingState:
        return replace(self, step=self.step + 1)


class CheckpointFile:
    """One file, replaced as a whole. Without a folder nothing is kept but the best weights."""

    def __init__(
        self,
        folder: Path | None,
        config: TrainingConfig,
        racc: RaccModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._path = folder / NAME if folder else None
        self._racc, self._optimizer = racc, optimizer
        self._best: dict[str, torch.Tensor] | None = None
        self._of = json.dumps({"course": asdict(config), "shape": asdict(racc.config)})

    def restored(self) -> TrainingState:
        if self._path is None or not self._path.exists():
            return TrainingState()
        try:
            kept = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever a damaged file provokes
            raise LoadError(
                f"{self._path} cannot be read: {error}", hint="delete it to train from the start"
            ) from error
        if kept["of"] != self._of:
            raise LoadError(
                f"{self._path} is from training with other settings",
                hint="use another folder, or the settings that it was begun with",
            )
        self._racc.load_state_dict(kept["weights"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._best = kept["best_weights"]
        return TrainingState(**kept["state"])

    def validated(self, state: TrainingState, loss: float) -> TrainingState:
        if loss < state.best:
            self._best = {name: one.clone() for name, one in self._racc.state_dict().items()}
            return replace(state, best=loss, worse=0)
        return replace(state, worse=state.worse + 1)

    def keep(self, state: TrainingState) -> None:
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
    """After a step, the first being 0. `validation` where one was made."""

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
    """Trains in place. With `folder` it leaves checkpoints there and goes on from the last one: the
    losses are then those of a run that was never stopped. Raises `LoadError` for a checkpoint of
    another course or another shape, and `SettingError` once a loss or a gradient is no number: the
    weights are then those of the step before. Once `stopped` says so it keeps a checkpoint after
    the step and returns False.

    With `held_out` lessons and `config.validate_every` the best weights by their loss are what
    remains.
    """
    racc.to(objective.hyper.device)
    optimizer = torch.optim.AdamW(
        racc.parameters(), lr=config.rate, weight_decay=config.weight_decay
    )
    checkpoints = CheckpointFile(folder, config, racc, optimizer)
    state = checkpoints.restored()
    while state.step < config.steps and state.worse < config.patience:
        rate = config.rate_at(state.step)
        loss = _step(racc, objective, batches, config, optimizer, state.step, rate)
        validation = None
        if held_out and config.validate_every and (state.step + 1) % config.validate_every == 0:
            validation = _validated(racc, objective, held_out, config)
            _finite(validation, "validation loss", state.step)
            state = checkpoints.validated(state, validation)
        report(TrainingProgress(state.step, loss, rate, validation))
        state = state.next()
        asked_to_stop = stopped() and state.step < config.steps
        if state.step % config.checkpoint_every == 0 or state.step == config.steps or asked_to_stop:
            checkpoints.keep(state)
        if asked_to_stop:
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
            loss = objective.loss(racc, batch, config, _hidden(batch, config, number))
        torch.autograd.backward(loss / config.accumulate)
        total += _finite(loss.item(), "loss", step) / config.accumulate
    length = nn.utils.clip_grad_norm_(racc.parameters(), config.clip)
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


def _hidden(batch: Sequence[TrainingExample], config: TrainingConfig, number: int) -> Tensor:
    """The scores, those of a share of the lessons all alike."""
    rng = random.Random(f"{config.seed}:{number}")
    told = torch.tensor([[float(rng.random() >= config.flat)] for _ in batch])
    return retrieval_scores(batch) * told


def _validated(
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
