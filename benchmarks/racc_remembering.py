"""Compressor training with memoized hidden states of demonstrations and questions.

A step through the hyper model costs ten times the aggregator and the modulation. Prompts that read
their positions from the start need no training, so their results can be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.objective import TrainingExample, TrainingObjective
from bottega.compression.store import content_digest
from bottega.kv_prefix import KeyValues
from bottega.types import Example, Query

AT_ONCE = 64


@dataclass(frozen=True)
class Remembering(TrainingObjective):
    """Training objective that memoizes the compressed texts of one compressor. Its `documents` and
    `queries` get no gradient and must stay constant, except for their slots: `moved` gives the
    offset.
    """

    _told: dict[str, Tensor] = field(default_factory=dict)
    _asked: dict[str, Tensor] = field(default_factory=dict)
    _real: dict[str, Tensor] = field(default_factory=dict)

    def moved(self, told: Tensor, asking: Tensor) -> None:
        for known, change in ((self._told, told), (self._asked, asking)):
            known.update({mark: one + change for mark, one in known.items()})

    def prompts(
        self,
        racc: RaccModel,
        lessons: Sequence[TrainingExample],
        scores: Tensor,
        *,
        prdb: bool = False,
    ) -> Tensor:
        return racc.aggregate(self.documents(racc, lessons), self.asked(racc, lessons), scores)

    def documents(self, racc: RaccModel, lessons: Sequence[TrainingExample]) -> Tensor:
        """Return memoized prompts of shape (batch, demonstrations, prompts, width)."""
        self._read(racc, (one for lesson in lessons for one in lesson.passages))
        return torch.stack(
            [
                torch.stack([self._told[content_digest(one)] for one in lesson.passages])
                for lesson in lessons
            ]
        )

    def asked(self, racc: RaccModel, lessons: Sequence[TrainingExample]) -> QueryPrompts:
        queries = [lesson.query for lesson in lessons]
        new = {_mark(one): one for one in queries if _mark(one) not in self._asked}
        for part in _parts(list(new)):
            with torch.no_grad():
                asked = racc.compress_query(
                    self.hyper, self.inputs.query_inputs([new[mark] for mark in part])
                )
            rows = torch.stack([asked.image, asked.question, asked.both], dim=1)
            self._asked.update(zip(part, rows, strict=True))
        known = torch.stack([self._asked[_mark(one)] for one in queries])
        return QueryPrompts(*known.unbind(1))

    def base_prefix(self, racc: RaccModel, passages: Sequence[Example]) -> KeyValues:
        new = {
            content_digest(one): one for one in passages if content_digest(one) not in self._real
        }
        for part in _parts(list(new)):
            made = super().base_prefix(racc, [new[mark] for mark in part])
            rows = torch.stack([torch.stack(layer) for layer in made.layers], dim=0)
            self._real.update(zip(part, rows.unbind(2), strict=True))
        rows = torch.stack([self._real[content_digest(one)] for one in passages], dim=2)
        return KeyValues(tuple((layer[0], layer[1]) for layer in rows))

    def _read(self, racc: RaccModel, passages: Iterable[Example]) -> None:
        new = {
            content_digest(one): one for one in passages if content_digest(one) not in self._told
        }
        for part in _parts(list(new)):
            with torch.no_grad():
                rows = racc.documents(self.hyper, self.inputs.passages([new[m] for m in part]))
            self._told.update(zip(part, rows, strict=True))

    def _long_enough(self, racc: RaccModel, passages: Sequence[Example]) -> list[bool]:
        """Return True for each passage: all are long enough here, and a check would read them
        again.
        """
        return [True] * len(passages)


def _mark(query: Query) -> str:
    return content_digest(Example(query, ""))


def _parts(marks: Sequence[str]) -> list[Sequence[str]]:
    return [marks[start : start + AT_ONCE] for start in range(0, len(marks), AT_ONCE)]
