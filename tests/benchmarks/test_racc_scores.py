"""The experiment with contradictory passages, on a few items."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

from benchmarks import racc_scores
from benchmarks.racc_scores import (
    RELIABILITIES,
    TRAINING,
    VARIANTS,
    WITHOUT,
    Experiment,
    ScaledParameter,
    Variant,
    evaluate_baselines,
    sampler,
    train_variant,
)
from bottega.compression.layers import Aggregator
from bottega.compression.persistence import load
from bottega.evaluation.benchmarks.loading import load_benchmark

TASK = "contradictions:queries=4,episodes=1,reliability=1.0"


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_strength_has_its_own_learning_rate(factor: float) -> None:
    aggregator = Aggregator(4, blocks=1)
    aggregator.strength.data.fill_(2.0)
    parametrize.register_parametrization(aggregator, "strength", ScaledParameter(factor))
    optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-4, weight_decay=0.0)
    torch.autograd.backward(aggregator.strength * 3)
    optimizer.step()
    parametrize.remove_parametrizations(aggregator, "strength")
    assert aggregator.strength.item() == pytest.approx(2.0 - factor * 1e-4)


@pytest.mark.slow
def test_trained_variants_are_ordinary_compressors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racc_scores, "BATCH", 2)
    monkeypatch.setattr(racc_scores, "CALIBRATION", 8)
    training = replace(TRAINING, steps=2, warmup_steps=0, learning_rate=1e-4)
    examples = sampler(TASK, 1)
    learned = Variant(strength=2.0, rate=1000.0)
    for variant in (VARIANTS[WITHOUT], learned):
        record = train_variant(variant, examples, training, tmp_path / str(variant.rgca))
        saved = load(tmp_path / str(variant.rgca)).racc
        assert saved.config.rgca == variant.rgca
        assert saved.aggregator.strength.item() == pytest.approx(record["strength"], abs=1e-2)
    assert abs(saved.aggregator.strength.item() - 2.0) > 0.05


def test_highest_score_is_right_as_often_as_the_reliability_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racc_scores, "BASELINES", ())
    reliable = load_benchmark(TASK, seed=0)
    unreliable = load_benchmark(TASK.replace("1.0", "0"), seed=0)
    assert evaluate_baselines(reliable) == {racc_scores.HIGHEST: [True] * 4}
    assert evaluate_baselines(unreliable) == {racc_scores.HIGHEST: [False] * 4}


def test_tables_compare_the_answers_to_the_same_items(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, ["RGCA", WITHOUT], seeds=(0, 1), limit=4)
    for reliability in RELIABILITIES:
        for seed in (0, 1):
            right, wrong = [True] * 3 + [False], [False] * 4
            rows = {
                "baselines": {"concat 1": right},
                "RGCA": {"racc 2": right, "racc-flat 2": wrong if seed else right},
                WITHOUT: {"racc 2": wrong, "racc-flat 2": wrong},
            }
            for name, scores in rows.items():
                record = {"scores": scores, "strength": 1.0}
                experiment.file(name, reliability, seed).write_text(json.dumps(record))

    lines = [line for line in experiment.tables() if line.startswith("| RGCA |")]

    assert len(lines) == len(RELIABILITIES)
    name, guided, flat, less_flat, less_none, by_seed, strengths = lines[0].strip("| ").split(" | ")
    assert (name, by_seed, strengths) == ("RGCA", "0.750 0.750", "1.0 1.0")
    assert guided.startswith("0.750 [0.409")
    assert flat.startswith("0.375 [")
    assert less_flat.startswith("+0.375 [")
    assert less_none.startswith("+0.750 [")
