"""Checkpoints of training: whole or not there, and only for the run that wrote them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bottega.compression.racc import Racc
from bottega.compression.training.course import Course
from bottega.errors import LoadError

NAME = "checkpoint.pt"


@dataclass(frozen=True)
class State:
    """`step` is the next one to take, `worse` how many validations ago the best one was."""

    step: int = 0
    best: float = math.inf
    worse: int = 0

    def next(self) -> State:
        return replace(self, step=self.step + 1)


class Checkpoints:
    """One file, replaced as a whole. Without a folder nothing is kept but the best weights."""

    def __init__(
        self, folder: Path | None, course: Course, racc: Racc, optimizer: torch.optim.Optimizer
    ) -> None:
        self._path = folder / NAME if folder else None
        self._racc, self._optimizer = racc, optimizer
        self._best: dict[str, torch.Tensor] | None = None
        self._of = json.dumps({"course": asdict(course), "shape": asdict(racc.shape)})

    def restored(self) -> State:
        if self._path is None or not self._path.exists():
            return State()
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
        return State(**kept["state"])

    def validated(self, state: State, loss: float) -> State:
        if loss < state.best:
            self._best = {name: one.clone() for name, one in self._racc.state_dict().items()}
            return replace(state, best=loss, worse=0)
        return replace(state, worse=state.worse + 1)

    def keep(self, state: State) -> None:
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
