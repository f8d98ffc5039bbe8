"""How a compressor is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bottega.compression.ranges import LARGEST_SEED, check_range
from bottega.errors import SettingError


@dataclass(frozen=True)
class Course:
    """The paper's training where nothing else is said: AdamW, a learning rate that rises from
    `first_rate` to `rate` within `warm_up` steps and falls to 0 as a cosine.

    `answer` weighs the loss of eq. 5, the cross-entropy of the annotated answers; `cache` weighs
    the distance from the prefix that the base model itself makes of the relevant passage
    (`Modulation.distance`), which is ours. `taught` replaces the annotated answers by the base
    model's own replies after all passages (sequence distillation, as PISCO does), which is not the
    paper's loss. `prdb` stops gradients at irrelevant passages. `flat` is
    the share of lessons whose retrieval scores are hidden, ours too: where scores always tell which
    passage is right, nothing else is learned. `validate_every` 0 never validates; training stops
    early after `patience` validations without a better loss.
    """

    steps: int
    rate: float = 1e-4
    first_rate: float = 1e-5
    warm_up: int = 1000
    weight_decay: float = 0.01
    clip: float = 1.0
    accumulate: int = 1
    half_precision: bool = False
    answer: float = 1.0
    cache: float = 0.0
    taught: bool = False
    prdb: bool = True
    flat: float = 0.0
    seed: int = 0
    checkpoint_every: int = 500
    validate_every: int = 0
    patience: int = 5

    def __post_init__(self) -> None:
        check_range(self, "steps", "accumulate", "checkpoint_every", "patience", low=1)
        check_range(self, "rate", "clip", low=0, open=True)
        check_range(self, "first_rate", "warm_up", "weight_decay", "validate_every", low=0)
        check_range(self, "answer", "cache", low=0)
        check_range(self, "flat", low=0, high=1)
        check_range(self, "seed", low=0, high=LARGEST_SEED)
        if not (self.answer or self.cache):
            raise SettingError("nothing is learned", hint="weigh answer or cache with more than 0")

    def rate_at(self, step: int) -> float:
        """Of step 0 to `steps` - 1."""
        if step < self.warm_up:
            return self.first_rate + (self.rate - self.first_rate) * step / self.warm_up
        share = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (1 + math.cos(math.pi * share)) / 2
