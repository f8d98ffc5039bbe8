"""Closed-form initialization of a compressor for demonstrations.

Demonstrations hold images, labels and words at the same positions from their end, and nearly all of
them look like the query. Attention by plain similarity then chooses by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bottega.compression.aggregator import CrossAttention
from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.objective import TrainingExample, TrainingObjective, relevance_mask
from bottega.compression.store import content_digest
from bottega.kv_prefix import KeyValues
from bottega.types import Example, Query

AT_ONCE = 64


@dataclass(frozen=True)
class MemoizedObjective(TrainingObjective):
    """Training objective that memoizes the compressed texts of one compressor. Its `documents` and
    `queries` get no gradient and must stay constant, except for their slots: `moved` gives the
    offset.
    """

    _told: dict[str, Tensor] = field(default_factory=dict)
    _asked: dict[str, Tensor] = field(default_factory=dict)
    _real: dict[str, Tensor] = field(default_factory=dict)

    def moved(self, record: Tensor, asking: Tensor) -> None:
        for candidates, change in ((self._told, record), (self._asked, asking)):
            candidates.update({mark: one + change for mark, one in candidates.items()})

    def prompts(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        scores: Tensor,
        *,
        prdb: bool = False,
    ) -> Tensor:
        return racc.aggregate(self.documents(racc, examples), self.asked(racc, examples), scores)

    def documents(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> Tensor:
        """Return memoized prompts of shape (batch, demonstrations, prompts, width)."""
        self._read(racc, (one for lesson in examples for one in lesson.passages))
        return torch.stack(
            [
                torch.stack([self._told[content_digest(one)] for one in lesson.passages])
                for lesson in examples
            ]
        )

    def asked(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> QueryPrompts:
        queries = [lesson.query for lesson in examples]
        new = {_mark(one): one for one in queries if _mark(one) not in self._asked}
        for part in _parts(list(new)):
            with torch.no_grad():
                asked = racc.compress_query(
                    self.hyper, self.inputs.query_inputs([new[mark] for mark in part])
                )
            rows = torch.stack([asked.image, asked.question, asked.both], dim=1)
            self._asked.update(zip(part, rows, strict=True))
        candidates = torch.stack([self._asked[_mark(one)] for one in queries])
        return QueryPrompts(*candidates.unbind(1))

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


SHRINKAGE = 0.1  # of both covariances; dimensions have about unit variance
RANK = 30
OWN_PLACE, RIGHT = 160.0, 30.0  # nats for a prompt's own place, and for the right demonstration
FIRST = 100.0  # a score that leaves no doubt


def begin(racc: RaccModel, between: MemoizedObjective, examples: Sequence[TrainingExample]) -> None:
    """Initialize both halves after `TrainingObjective.calibrate`, which sets the scales."""
    documents, asked = between.documents(racc, examples), between.asked(racc, examples)
    before = [one.detach().clone() for one in _slots(racc)]
    point(racc, documents, asked.both, relevance_mask(examples))
    between.moved(*(now.detach() - one for now, one in zip(_slots(racc), before, strict=True)))
    refit(racc, between, examples)


@torch.no_grad()
def point(racc: RaccModel, documents: Tensor, asked: Tensor, relevant: Tensor) -> None:
    """Set the aggregator's first attention by the discriminant of right and wrong demonstrations:
    the covariance of a query with the difference of the two, in units of both covariances, in
    its `RANK` strongest directions. A prompt keeps its own position, which the slots encode.
    """
    block, (record, asking) = racc.aggregator.blocks[0], _slots(racc)
    assert isinstance(block, CrossAttention)
    both = relevant.any(1) & ~relevant.all(1)
    # All prompts of a query read the same token: one of them says it all.
    documents, queries = documents - record, asked[:, -1] - asking[-1]
    varying = _spread(documents.flatten(0, 2))
    slots = torch.linalg.eigh(varying).eigenvectors[:, : len(record)]
    for slot in (record, asking):
        slot.copy_(slots.T * len(slots) ** 0.5)

    right = relevant[both].float()
    apart = _mean(documents[both], right) - _mean(documents[both], 1 - right)
    average = queries.mean(0)
    queries = queries[both] - average
    common = torch.einsum("bw,bnv->wv", queries, apart) / (apart.shape[0] * apart.shape[1])
    discriminant = torch.linalg.solve(_spread(queries), common) @ varying.inverse()
    others = torch.eye(len(slots)) - slots @ slots.T
    left, sizes, last = torch.linalg.svd(others @ discriminant @ others)
    discriminant = left[:, :RANK] * sizes[:RANK] @ last[:RANK]
    gain = torch.einsum("bw,wv,bnv->bn", queries, discriminant, apart).mean()
    nats = OWN_PLACE / len(slots) * slots @ slots.T + RIGHT / gain * discriminant
    weight = nats.T * len(slots) ** 0.5  # attention divides by the root of the width
    block.query.weight.copy_(weight)
    block.query.bias.copy_(-weight @ average)


@torch.no_grad()
def refit(racc: RaccModel, between: TrainingObjective, examples: Sequence[TrainingExample]) -> None:
    """Fit keys and values to prompts again, with one scale for all positions: the content of a
    position depends on the length of the label.
    """
    taught = [one for one in examples if any(one.relevant)]
    first = [one.relevant.index(True) for one in taught]
    real = between.base_prefix(
        racc, [lesson.passages[position] for lesson, position in zip(taught, first, strict=True)]
    )
    modulation, joined = racc.modulation, racc.modulation.join(real)
    apart = (joined - joined.mean(1, keepdim=True)).flatten(1, 2).std(1)[:, None]
    modulation.centre.copy_(joined.mean(1))
    modulation.spread.copy_(apart.where(apart > 1e-3, torch.zeros(())).expand_as(modulation.spread))
    certain = FIRST * racc.aggregator.log_temperature.exp()
    scores = nn.functional.one_hot(torch.tensor(first), len(taught[0].passages)) * certain
    modulation.fit(between.prompts(racc, taught, scores), real)


def _slots(racc: RaccModel) -> tuple[Tensor, Tensor]:
    record, asking = racc.documents.reader, racc.queries.reader
    assert record is not None and asking is not None
    return record.slot, asking.slot


def _mean(documents: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the demonstrations of each example."""
    weights = weights / weights.sum(1, keepdim=True)
    return (documents * weights[..., None, None]).sum(1)


def _spread(rows: Tensor) -> Tensor:
    return torch.cov(rows.T) + SHRINKAGE * torch.eye(rows.shape[1])
