"""What a compressor is taught from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bottega.types import Example, Query


@dataclass(frozen=True)
class Lesson:
    """A query with what was retrieved for it. `relevant` are the passages that hold one of the
    annotated answers (pseudo-relevance, Luo et al. 2021), or demonstrations that give it."""

    query: Query
    passages: tuple[Example, ...]
    scores: tuple[float, ...]
    relevant: tuple[bool, ...]
    answer: str


class Lessons(Protocol):
    """The batch of a step, always the same one: that is what makes training resumable. All of a
    batch have equally many passages."""

    def __call__(self, step: int, /) -> Sequence[Lesson]: ...


def scores_of(lessons: Sequence[Lesson]) -> Tensor:
    return torch.tensor([lesson.scores for lesson in lessons])


def relevance_of(lessons: Sequence[Lesson]) -> Tensor:
    return torch.tensor([lesson.relevant for lesson in lessons])
