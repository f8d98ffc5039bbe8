"""Compressors between models of other devices and precisions."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.compression.hyper_model import HyperModel, InputBuilder, ProcessorInputs
from bottega.compression.model import RaccModel
from bottega.compression.objective import (
    TrainingConfig,
    TrainingExample,
    TrainingObjective,
    retrieval_scores,
)
from bottega.compression.passage_store import PassageStore, StoreManifest
from bottega.compression.prefixes import PassageCompressor
from bottega.compression.training import TrainingProgress, train
from bottega.image import Image
from bottega.types import Candidate, Prompt, Query
from tests.builders import solid_image
from tests.compression import tiny_models
from tests.compression.tiny_models import encode, passages
from tests.kv_prefix.tiny_models import END, tiny

HALF, FULL = torch.bfloat16, torch.float32
PLACES = [
    pytest.param(("cpu", HALF), ("cpu", FULL), id="half before full", marks=pytest.mark.slow),
    pytest.param(("cpu", FULL), ("cpu", HALF), id="full before half"),
    pytest.param(("cpu", HALF), ("cpu", HALF), id="half"),
    pytest.param(("cuda", FULL), ("cpu", FULL), id="hyper on a GPU", marks=pytest.mark.gpu),
    pytest.param(("cpu", FULL), ("cuda", FULL), id="base on a GPU", marks=pytest.mark.gpu),
    pytest.param(("cuda", HALF), ("cuda", HALF), id="half on a GPU", marks=pytest.mark.gpu),
]
DeviceKind = tuple[str, torch.dtype]
HERE: DeviceKind = ("cpu", FULL)
CONFIG = TrainingConfig(
    steps=2,
    warmup_steps=1,
    learning_rate=1e-3,
    answer_weight=1.0,
    cache_weight=1.0,
    prdb=True,
    checkpoint_every=1,
)


@dataclass(frozen=True)
class DeviceModel:
    """Model on its device, with inputs that a processor would move there."""

    model: Any

    @classmethod
    def at(cls, device: DeviceKind) -> DeviceModel:
        return cls(deepcopy(tiny("llava").model).to(*device))

    def encode(self, prompts: Sequence[Prompt], /) -> ProcessorInputs:
        kinds = {True: self.model.dtype, False: None}
        return {
            name: one.to(self.model.device, kinds[one.is_floating_point()])
            for name, one in encode(prompts).items()
        }

    @property
    def texts(self) -> InputBuilder:
        return InputBuilder(self.encode, frozenset({END}))


def make_objective(hyper: DeviceKind, base: DeviceKind) -> TrainingObjective:
    one, other = DeviceModel.at(hyper), DeviceModel.at(base)
    return TrainingObjective(HyperModel(one.model), one.texts, other.model, other.texts, END)


def training_examples(*images: Image) -> list[TrainingExample]:
    return [
        TrainingExample(
            Query("where is number 1", images), tuple(passages_of_query), (2.0, 1.0), right, "red"
        )
        for passages_of_query, right in (
            (passages(2, "a"), (True, False)),
            (passages(2, "b"), (False, True)),
        )
    ]


def ready(between: TrainingObjective) -> RaccModel:
    racc = tiny_models.racc(prompting="both")
    between.calibrate(racc, [one for _ in range(8) for one in training_examples()])
    return racc


@pytest.mark.parametrize(("hyper", "base"), PLACES)
def test_training_loss_equals_full_precision_cpu_loss(
    hyper: DeviceKind, base: DeviceKind, tmp_path: Path
) -> None:
    here, there = make_objective(HERE, HERE), make_objective(hyper, base)
    expected_racc = ready(here)
    # Calibration inverts matrices: one of its own per precision would multiply rounding errors.
    racc = deepcopy(expected_racc).to(there.hyper.device)
    scores = retrieval_scores(training_examples())
    made = there.prompts(racc, training_examples(solid_image(9)), scores).detach().cpu()
    expected_prompts = here.prompts(
        expected_racc, training_examples(solid_image(9)), scores
    ).detach()
    assert (made - expected_prompts).norm() < 0.03 * expected_prompts.norm()

    loss = there.loss(racc, training_examples(solid_image(9)), CONFIG, scores)
    torch.autograd.backward(loss)
    expected = here.loss(expected_racc, training_examples(solid_image(9)), CONFIG, scores)
    assert loss.item() == pytest.approx(expected.item(), rel=0.1)
    for name, weight in racc.named_parameters():
        assert (weight.dtype, weight.device.type) == (FULL, hyper[0]), name
        assert weight.grad is not None and weight.grad.isfinite().all(), name

    seen: list[TrainingProgress] = []
    for _ in range(2):  # the second time from a checkpoint
        train(
            ready(there),
            there,
            lambda step: training_examples(),
            CONFIG,
            folder=tmp_path,
            report=seen.append,
            stopped=lambda: True,
        )
    assert [one.step for one in seen] == [0, 1]


@pytest.mark.parametrize(("hyper", "base"), PLACES)
def test_prefix_equals_full_precision_cpu_prefix(
    hyper: DeviceKind, base: DeviceKind, tmp_path: Path
) -> None:
    shown = [Candidate(replace(one, id=f"p{i}"), 1.0) for i, one in enumerate(passages(3))]
    query = Query("where is it", (solid_image(9),))
    racc = ready(make_objective(HERE, HERE))
    here = DeviceModel.at(HERE)
    expected = PassageCompressor(deepcopy(racc), HyperModel(here.model), here.texts).prefix(
        query, shown
    )

    there = DeviceModel.at(hyper)
    made = PassageCompressor(racc, HyperModel(there.model), there.texts)
    store = PassageStore(
        tmp_path, StoreManifest("a", racc.config.document_prompts, racc.config.width)
    )
    store.add([(str(one.example.id), one.example) for one in shown], made.compress)
    stored = PassageCompressor(racc, HyperModel(there.model), there.texts, store)
    for found in (made.prefix(query, shown), stored.prefix(query, shown)):
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert abs(one - other).mean() < 0.1 * abs(other).mean()
