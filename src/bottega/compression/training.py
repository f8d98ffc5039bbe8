"""Training loop of a compressor, with atomic checkpoints that resume only the same run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from bottega._util.durable_files import replacement
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
    an uninterrupted run up to rounding. With `held_out` examples and `config.validate_every`, keep
    the weights with the best validation loss. When `stopped()` is true, write a checkpoint after
    the step and return False.

    Raises `LoadError` for a checkpoint with other settings, `StoreError` for one that cannot be
    written, and `SettingError` if a loss or gradient is not finite; the weights are then those of
    the step before.
    """
    training = _Training(racc, objective, config, folder)
    state = training.restore()
    while state.step < config.steps and state.worse < config.patience:
        rate = config.rate_at(state.step)
        loss = training.step(batches, state.step, rate)
        validation = None
        if held_out and config.validate_every and (state.step + 1) % config.validate_every == 0:
            validation = training.validate(held_out, state.step)
            state = training.keep_best(state, validation)
        report(TrainingProgress(state.step, loss, rate, validation))
        state = replace(state, step=state.step + 1)
        stopping = stopped() and state.step < config.steps
        if state.step % config.checkpoint_every == 0 or state.step == config.steps or stopping:
            training.save(state)
        if stopping:
            return False
    training.restore_best()
    return True


class _Training:
    """Training of one compressor, with a checkpoint file that is replaced atomically. Without a
    folder only the best weights are kept, in memory."""

    def __init__(
        self,
        racc: RaccModel,
        objective: TrainingObjective,
        config: TrainingConfig,
        folder: Path | None,
    ) -> None:
        self._racc, self._objective, self._config = racc, objective, config
        racc.to(objective.hyper.device)
        self._optimizer = torch.optim.AdamW(
            racc.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._path = folder / CHECKPOINT if folder else None
        self._best_weights: dict[str, torch.Tensor] | None = None
        self._settings = {"training": asdict(config), "compressor": asdict(racc.config)}

    def step(self, batches: TrainingBatches, step: int, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        total, count = 0.0, self._config.accumulate
        for number in range(step * count, (step + 1) * count):
            batch = batches(number)
            # Seeded by the batch's number, so a resumed run hides the same scores.
            rng = random.Random(f"{self._config.seed}:{number}")
            visible = [[float(rng.random() >= self._config.hide_scores)] for _ in batch]
            with self._autocast():
                scores = retrieval_scores(batch) * torch.tensor(visible)
                loss = self._objective.loss(self._racc, batch, self._config, scores)
            torch.autograd.backward(loss / count)
            total += _finite(loss.item(), "loss", step) / count
        norm = nn.utils.clip_grad_norm_(self._racc.parameters(), self._config.clip)
        # Checked before the update: the weights of the step before stay usable.
        _finite(norm.item(), "gradient", step)
        self._optimizer.step()
        return total

    def validate(self, held_out: Sequence[TrainingExample], step: int) -> float:
        scores = retrieval_scores(held_out)
        with torch.no_grad(), self._autocast():
            loss = self._objective.loss(self._racc, held_out, self._config, scores)
        return _finite(loss.item(), "validation loss", step)

    def _autocast(self) -> torch.autocast:
        """Return bfloat16 autocast, which has the range of fp32 and needs no loss scaling."""
        kind = self._objective.hyper.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self._config.half_precision)

    def keep_best(self, state: TrainingState, loss: float) -> TrainingState:
        if loss >= state.best:
            return replace(state, worse=state.worse + 1)
        # Clones: the optimizer changes the tensors of `state_dict` in place.
        weights = self._racc.state_dict()
        self._best_weights = {name: one.clone() for name, one in weights.items()}
        return replace(state, best=loss, worse=0)

    def restore(self) -> TrainingState:
        if self._path is None or not self._path.exists():
            return TrainingState()
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for a damaged file
            raise LoadError(
                f"{self._path} cannot be read: {error}", hint="delete it to train from the start"
            ) from error
        if json.loads(saved["of"]) != self._settings:
            raise LoadError(
                f"{self._path} was written with other settings",
                hint="use another folder, or the settings of that run",
            )
        self._racc.load_state_dict(saved["weights"])
        # Keyed by position in `parameters()`, not by name.
        self._optimizer.load_state_dict(saved["optimizer"])
        self._best_weights = saved["best_weights"]
        return TrainingState(**saved["state"])

    def restore_best(self) -> None:
        if self._best_weights is not None:
            self._racc.load_state_dict(self._best_weights)

    def save(self, state: TrainingState) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "of": json.dumps(self._settings),
            "state": asdict(state),
            "weights": self._racc.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "best_weights": self._best_weights,
        }
        with replacement(self._path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                # If the file cannot be written, torch fails once more when it closes its archive.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def _finite(number: float, name: str, step: int) -> float:
    if not math.isfinite(number):
        raise SettingError(
            f"the {name} of step {step + 1} must be finite, got {number}",
            hint="train in another folder with a lower learning_rate or smaller answer_weight and"
            " cache_weight",
        )
    return number
