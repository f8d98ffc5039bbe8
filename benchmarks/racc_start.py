"""Closed-form initialization of a compressor for demonstrations.

Demonstrations hold images, labels and words at the same positions from their end, and nearly all of
them look like the query. Attention by plain similarity then chooses by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bottega.compression.layers import CrossAttention
from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.objective import TrainingExample, TrainingObjective, relevance_mask
from bottega.compression.passage_store import content_digest
from bottega.kv_prefix import KeyValues
from bottega.types import Example, Query

AT_ONCE = 64


@dataclass(frozen=True)
class MemoizedObjective(TrainingObjective):
    """Training objective that memoizes the compressed texts of one compressor. Its `documents` and
    `query_prompts` get no gradient and must stay constant, except for their slots: `shift` adds
    the offset.
    """

    _documents: dict[str, Tensor] = field(default_factory=dict)
    _queries: dict[str, Tensor] = field(default_factory=dict)
    _prefixes: dict[str, Tensor] = field(default_factory=dict)

    def shift(self, document_slot: Tensor, query_slot: Tensor) -> None:
        for candidates, change in ((self._documents, document_slot), (self._queries, query_slot)):
            candidates.update({digest: one + change for digest, one in candidates.items()})

    def prompts(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        scores: Tensor,
        *,
        prdb: bool = False,
    ) -> Tensor:
        return racc.aggregate(
            self.documents(racc, examples), self.query_prompts(racc, examples), scores
        )

    def documents(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> Tensor:
        """Return memoized prompts of shape (batch, demonstrations, prompts, width)."""
        self._read(racc, (one for example in examples for one in example.passages))
        return torch.stack(
            [
                torch.stack([self._documents[content_digest(one)] for one in example.passages])
                for example in examples
            ]
        )

    def query_prompts(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> QueryPrompts:
        queries = [example.query for example in examples]
        new = {_digest(one): one for one in queries if _digest(one) not in self._queries}
        for part in _parts(list(new)):
            with torch.no_grad():
                compressed = racc.compress_query(
                    self.hyper, self.inputs.query_inputs([new[digest] for digest in part])
                )
            rows = torch.stack([compressed.image, compressed.question, compressed.both], dim=1)
            self._queries.update(zip(part, rows, strict=True))
        candidates = torch.stack([self._queries[_digest(one)] for one in queries])
        return QueryPrompts(*candidates.unbind(1))

    def base_prefix(self, racc: RaccModel, passages: Sequence[Example]) -> KeyValues:
        new = {
            content_digest(one): one
            for one in passages
            if content_digest(one) not in self._prefixes
        }
        for part in _parts(list(new)):
            made = super().base_prefix(racc, [new[digest] for digest in part])
            rows = torch.stack([torch.stack(layer) for layer in made.layers], dim=0)
            self._prefixes.update(zip(part, rows.unbind(2), strict=True))
        rows = torch.stack([self._prefixes[content_digest(one)] for one in passages], dim=2)
        return KeyValues(tuple((layer[0], layer[1]) for layer in rows))

    def _read(self, racc: RaccModel, passages: Iterable[Example]) -> None:
        new = {
            content_digest(one): one
            for one in passages
            if content_digest(one) not in self._documents
        }
        for part in _parts(list(new)):
            with torch.no_grad():
                rows = racc.documents(self.hyper, self.inputs.passages([new[m] for m in part]))
            self._documents.update(zip(part, rows, strict=True))

    def _long_enough(self, racc: RaccModel, passages: Sequence[Example]) -> list[bool]:
        """Return True for each passage: all are long enough here, and a check would read them
        again.
        """
        return [True] * len(passages)


def _digest(query: Query) -> str:
    return content_digest(Example(query, ""))


def _parts(digests: Sequence[str]) -> list[Sequence[str]]:
    return [digests[start : start + AT_ONCE] for start in range(0, len(digests), AT_ONCE)]


SHRINKAGE = 0.1  # of both covariances; dimensions have about unit variance
RANK = 30
OWN_POSITION, RIGHT = 160.0, 30.0  # nats for the own position and the right demonstration
CERTAIN = 100.0  # retrieval score that dominates all others


def initialize(
    racc: RaccModel, objective: MemoizedObjective, examples: Sequence[TrainingExample]
) -> None:
    """Initialize both halves after `TrainingObjective.calibrate`, which sets the scales."""
    documents = objective.documents(racc, examples)
    compressed = objective.query_prompts(racc, examples)
    before = [one.detach().clone() for one in _slots(racc)]
    fit_first_attention(racc, documents, compressed.both, relevance_mask(examples))
    objective.shift(*(now.detach() - one for now, one in zip(_slots(racc), before, strict=True)))
    refit(racc, objective, examples)


@torch.no_grad()
def fit_first_attention(
    racc: RaccModel, documents: Tensor, compressed: Tensor, relevant: Tensor
) -> None:
    """Set the aggregator's first attention by the discriminant of right and wrong demonstrations:
    the covariance of a query with the difference of the two, in units of both covariances, in
    its `RANK` strongest directions. A prompt keeps its own position, which the slots encode.
    """
    block, (document_slot, query_slot) = racc.aggregator.blocks[0], _slots(racc)
    assert isinstance(block, CrossAttention)
    both = relevant.any(1) & ~relevant.all(1)
    # All prompts of a query read the same token, so the last one suffices.
    documents, queries = documents - document_slot, compressed[:, -1] - query_slot[-1]
    varying = _spread(documents.flatten(0, 2))
    slots = torch.linalg.eigh(varying).eigenvectors[:, : len(document_slot)]
    for slot in (document_slot, query_slot):
        slot.copy_(slots.T * len(slots) ** 0.5)

    right = relevant[both].float()
    difference = _mean(documents[both], right) - _mean(documents[both], 1 - right)
    average = queries.mean(0)
    queries = queries[both] - average
    common = torch.einsum("bw,bnv->wv", queries, difference) / (
        difference.shape[0] * difference.shape[1]
    )
    discriminant = torch.linalg.solve(_spread(queries), common) @ varying.inverse()
    others = torch.eye(len(slots)) - slots @ slots.T
    left, sizes, last = torch.linalg.svd(others @ discriminant @ others)
    discriminant = left[:, :RANK] * sizes[:RANK] @ last[:RANK]
    gain = torch.einsum("bw,wv,bnv->bn", queries, discriminant, difference).mean()
    nats = OWN_POSITION / len(slots) * slots @ slots.T + RIGHT / gain * discriminant
    weight = nats.T * len(slots) ** 0.5  # attention divides by the root of the width
    block.query.weight.copy_(weight)
    block.query.bias.copy_(-weight @ average)


@torch.no_grad()
def refit(
    racc: RaccModel, objective: TrainingObjective, examples: Sequence[TrainingExample]
) -> None:
    """Fit keys and values to prompts again, with one scale for all positions: the content of a
    position depends on the length of the label.
    """
    relevant = [one for one in examples if any(one.relevant)]
    first = [one.relevant.index(True) for one in relevant]
    real = objective.base_prefix(
        racc,
        [example.passages[position] for example, position in zip(relevant, first, strict=True)],
    )
    modulation, joined = racc.modulation, racc.modulation.join(real)
    difference = (joined - joined.mean(1, keepdim=True)).flatten(1, 2).std(1)[:, None]
    modulation.centre.copy_(joined.mean(1))
    modulation.spread.copy_(
        difference.where(difference > 1e-3, torch.zeros(())).expand_as(modulation.spread)
    )
    certain = CERTAIN * racc.aggregator.log_temperature.exp()
    scores = nn.functional.one_hot(torch.tensor(first), len(relevant[0].passages)) * certain
    modulation.fit(objective.prompts(racc, relevant, scores), real)


def _slots(racc: RaccModel) -> tuple[Tensor, Tensor]:
    documents, queries = racc.documents.reader, racc.queries.reader
    assert documents is not None and queries is not None
    return documents.slot, queries.slot


def _mean(documents: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the demonstrations of each example."""
    weights = weights / weights.sum(1, keepdim=True)
    return (documents * weights[..., None, None]).sum(1)


def _spread(rows: Tensor) -> Tensor:
    return torch.cov(rows.T) + SHRINKAGE * torch.eye(rows.shape[1])
