"""Closed-form initialization separates demonstrations that do not resemble the query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.racc_start import MemoizedObjective, fit_first_attention, initialize
from bottega.compression.layers import CrossAttention
from bottega.compression.model import RaccModel
from bottega.compression.objective import (
    TrainingConfig,
    TrainingExample,
    TrainingObjective,
    relevance_mask,
)
from bottega.compression.training import train
from bottega.types import Example, Query
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, model, texts
from tests.kv_prefix.tiny_models import END

WIDTH, PROMPTS, SHOTS, VALUES = 32, 3, 4, 6


@dataclass(frozen=True)
class Batch:
    documents: torch.Tensor
    queries: torch.Tensor
    relevant: torch.Tensor


def random_batch(racc: RaccModel, count: int, seed: int) -> Batch:
    """Return random vectors: a query has its value in some dimensions, a demonstration in others;
    the rest is noise, and the last few hardly vary."""
    assert racc.documents.reader is not None and racc.queries.reader is not None
    rng = torch.Generator().manual_seed(seed)
    wanted = torch.randint(VALUES, (count,), generator=rng)
    shown = torch.randint(VALUES, (count, SHOTS), generator=rng)
    queries = torch.randn(count, 1, WIDTH, generator=rng)
    documents = torch.randn(count, SHOTS, PROMPTS, WIDTH, generator=rng)
    values = torch.eye(VALUES) * 3
    queries[..., :VALUES], documents[..., 8 : 8 + VALUES] = (
        values[wanted][:, None],
        values[shown][:, :, None],
    )
    for rows in (queries, documents):
        rows[..., -2 * PROMPTS :] *= 0.01
    return Batch(
        documents + racc.documents.reader.slot.detach(),
        queries + racc.queries.reader.slot.detach(),
        shown == wanted[:, None],
    )


def weights(racc: RaccModel, batch: Batch) -> torch.Tensor:
    """(examples, query prompts, demonstrations, document prompts)"""
    block = racc.aggregator.blocks[0]
    assert isinstance(block, CrossAttention)
    with torch.no_grad():
        query, key = block.query(batch.queries), block.key(batch.documents.flatten(1, 2))
        answers: torch.Tensor = (query @ key.transpose(1, 2) / WIDTH**0.5).softmax(-1)
    return answers.reshape(*answers.shape[:2], SHOTS, PROMPTS)


def on_right(racc: RaccModel, batch: Batch) -> float:
    able = batch.relevant.any(1)
    share = weights(racc, batch).sum(-1) * batch.relevant[:, None]
    return share[able].sum(-1).mean().item()


def test_prompts_attend_to_the_right_demonstration_at_their_position() -> None:
    racc = tiny_models.racc(document_prompts=PROMPTS)
    before = on_right(racc, random_batch(racc, 300, 1))

    some = random_batch(racc, 1500, 0)
    fit_first_attention(racc, some.documents, some.queries, some.relevant)
    fresh = random_batch(racc, 300, 1)

    assert before < 0.6 and on_right(racc, fresh) > 0.9
    own = weights(racc, fresh).diagonal(dim1=1, dim2=3).sum(1)
    assert own.mean() > 0.95


def examples(count: int) -> Sequence[TrainingExample]:
    rng, made = random.Random(0), []
    for _ in range(count):
        number = rng.randrange(9)
        shown = tuple(
            Example(Query(f"number {one} is it"), f"word{one} of {one}")
            for one in rng.sample(range(9), 3)
        )
        relevant = tuple(f" {number} " in one.query.text for one in shown)
        query = Query(f"number {number} is it")
        made.append(
            TrainingExample(query, shown, (1.0, 0.5, 0.2), relevant, f"word{number} of {number}")
        )
    return made


def initialized() -> tuple[RaccModel, MemoizedObjective, TrainingObjective]:
    """Return the initialized models, and an objective without memoization."""
    racc = tiny_models.racc(document_prompts=PROMPTS)
    plain = TrainingObjective(hyper(), texts(), model().model, texts(), END)
    objective = MemoizedObjective(**vars(plain))
    objective.calibrate(racc, examples(30))
    initialize(racc, objective, examples(80))
    return racc, objective, plain


def test_initial_kv_is_nearer_to_the_right_demonstration_than_to_the_mean() -> None:
    racc, _, plain = initialized()
    able = [one for one in examples(80) if any(one.relevant)]
    scores = relevance_mask(able).float() * 100
    real = plain.base_prefix(racc, [one.passages[one.relevant.index(True)] for one in able])
    with torch.no_grad():
        distance = racc.modulation.distance(plain.prompts(racc, able, scores), real)
    assert distance < 0.2 * racc.modulation.standardize(real).square().mean()


def test_memoized_states_equal_recomputed_ones() -> None:
    """This holds after the initialization shifts the slots, and after a training step."""
    racc, objective, plain = initialized()
    batch, scores = examples(8), torch.randn(8, 3)
    how = TrainingConfig(
        steps=2, warmup_steps=0, learning_rate=1e-2, answer_weight=0.0, cache_weight=1.0, prdb=False
    )

    for _ in range(2):
        torch.testing.assert_close(
            objective.loss(racc, batch, how, scores),
            plain.loss(racc, batch, how, scores),
            atol=1e-4,
            rtol=1e-4,
        )
        train(racc, objective, lambda step: batch, how)
