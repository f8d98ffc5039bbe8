"""Closed-form initialization of a compressor for demonstrations.

Demonstrations hold images, labels and words at the same positions from their end, and nearly all of
them look like the query. Attention by plain similarity then chooses by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.racc_remembering import Remembering
from bottega.compression.aggregator import CrossAttention
from bottega.compression.model import RaccModel
from bottega.compression.objective import TrainingExample, TrainingObjective, relevance_mask

SHRINKAGE = 0.1  # of both covariances; dimensions have about unit variance
RANK = 30
OWN_PLACE, RIGHT = 160.0, 30.0  # nats for a prompt's own place, and for the right demonstration
FIRST = 100.0  # a score that leaves no doubt


def begin(racc: RaccModel, between: Remembering, lessons: Sequence[TrainingExample]) -> None:
    """Initialize both halves after `TrainingObjective.calibrate`, which sets the scales."""
    documents, asked = between.documents(racc, lessons), between.asked(racc, lessons)
    before = [one.detach().clone() for one in _slots(racc)]
    point(racc, documents, asked.both, relevance_mask(lessons))
    between.moved(*(now.detach() - one for now, one in zip(_slots(racc), before, strict=True)))
    refit(racc, between, lessons)


@torch.no_grad()
def point(racc: RaccModel, documents: Tensor, asked: Tensor, relevant: Tensor) -> None:
    """Set the aggregator's first attention by the discriminant of right and wrong demonstrations:
    the covariance of a query with the difference of the two, in units of both covariances, in
    its `RANK` strongest directions. A prompt keeps its own position, which the slots encode.
    """
    block, (told, asking) = racc.aggregator.blocks[0], _slots(racc)
    assert isinstance(block, CrossAttention)
    both = relevant.any(1) & ~relevant.all(1)
    # All prompts of a query read the same token: one of them says it all.
    documents, queries = documents - told, asked[:, -1] - asking[-1]
    varying = _spread(documents.flatten(0, 2))
    slots = torch.linalg.eigh(varying).eigenvectors[:, : len(told)]
    for slot in (told, asking):
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
def refit(racc: RaccModel, between: TrainingObjective, lessons: Sequence[TrainingExample]) -> None:
    """Fit keys and values to prompts again, with one scale for all positions: the content of a
    position depends on the length of the label.
    """
    taught = [one for one in lessons if any(one.relevant)]
    first = [one.relevant.index(True) for one in taught]
    real = between.base_prefix(
        racc, [lesson.passages[place] for lesson, place in zip(taught, first, strict=True)]
    )
    modulation, joined = racc.modulation, racc.modulation.join(real)
    apart = (joined - joined.mean(1, keepdim=True)).flatten(1, 2).std(1)[:, None]
    modulation.centre.copy_(joined.mean(1))
    modulation.spread.copy_(apart.where(apart > 1e-3, torch.zeros(())).expand_as(modulation.spread))
    certain = FIRST * racc.aggregator.log_temperature.exp()
    scores = nn.functional.one_hot(torch.tensor(first), len(taught[0].passages)) * certain
    modulation.fit(between.prompts(racc, taught, scores), real)


def _slots(racc: RaccModel) -> tuple[Tensor, Tensor]:
    told, asking = racc.documents.reader, racc.queries.reader
    assert told is not None and asking is not None
    return told.slot, asking.slot


def _mean(documents: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the demonstrations of each example."""
    weights = weights / weights.sum(1, keepdim=True)
    return (documents * weights[..., None, None]).sum(1)


def _spread(rows: Tensor) -> Tensor:
    return torch.cov(rows.T) + SHRINKAGE * torch.eye(rows.shape[1])
