"""RACC with the bundled apprentice, for each switch: `python -m benchmarks.racc_quality --work DIR
[--only NAME,...]`.

Each variant is trained from scratch on the bundled compressor's training examples (fewer steps) and
evaluated like `bottega eval facts`, with its controls. Each variant has one JSON file; existing
files are not computed again. See docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bottega.bundled import bundled_folder
from bottega.compression import CompressorConfig, RaccModel, save, sentence_prompts
from bottega.compression.objective import TrainingObjective
from bottega.compression.training import train
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.planning import plan
from bottega.evaluation.runner import evaluate
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.recipes.racc_training import training_objective
from bottega.types import Sampling
from training.compressor import LAYER, TRAINING, FactSampler, compressor_config, fact_batches

STEPS, SHOTS = 300, (5,)
METHODS = ("racc", "racc-oracle", "racc-flat")
CONTROLLED = 100  # with the passages of others some replies go on to the last token
MAX_TOKENS = 24  # tokens of a reply; answers have fewer
HARD_PROMPT = "Summarize the key information of the given passage in a concise manner."


@dataclass(frozen=True)
class Variant:
    """Difference from the bundled compressor."""

    compressor: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True
    hard: float = 0.5
    hyper: str | None = None
    layer: int = LAYER


BY_ANSWERS: dict[str, Any] = {"answer_weight": 1.0, "cache_weight": 0.0, "distill": True}
BY_GOLD = BY_ANSWERS | {"distill": False}
VARIANTS: dict[str, Variant] = {
    "as bundled": Variant(),
    "scores always shown": Variant(training={"hide_scores": 0.0}),
    "scores never shown": Variant(training={"hide_scores": 1.0}),
    "without RGCA": Variant({"rgca": False}),
    "without DCVQ": Variant({"dcvq": False}),
    "with PRDB": Variant(training={"prdb": True}),
    "by answers alone": Variant(training=BY_ANSWERS),
    "by answers slowly": Variant(training=BY_ANSWERS | {"learning_rate": 1e-4}),
    "by gold slowly": Variant(training=BY_GOLD | {"learning_rate": 1e-4}),
    "random start": Variant({"start": "random"}),
    "prompts appended": Variant({"prompting": "appended"}),
    "prompts appended and reading": Variant({"prompting": "both"}),
    "as in the paper": Variant(
        {"prompting": "appended", "start": "random"},
        {**BY_ANSWERS, "prdb": True, "hide_scores": 0.0},
        calibrated=False,
    ),
    "no hard examples": Variant(hard=0.0),
    # Trials of 40 steps, all scores equal, n = 60: 0.77 by layer 1, 0.13 by layer 2, the last.
    "master compresses": Variant(hyper="master", layer=1),
} | {
    f"{count} prompts": Variant({"document_prompts": count, "query_prompts": count})
    for count in (2, 4, 6, 10, 14)
}


def train_variant(
    variant: Variant, examples: FactSampler, out: Path, steps: int
) -> dict[str, object]:
    model, hyper = _loaded("apprentice"), _loaded(variant.hyper) if variant.hyper else None
    objective = training_objective(model, hyper, layer=variant.layer)
    torch.manual_seed(0)
    config = replace(compressor_config(model), width=objective.hyper.width, **variant.compressor)
    racc = RaccModel(config, _hard(hyper or model, objective, config))
    if variant.calibrated:
        objective.calibrate(racc, examples.sample(512, -1))
    training = replace(TRAINING, steps=steps, **variant.training)
    losses: list[float] = []
    started = time.perf_counter()
    train(racc, objective, examples, training, report=lambda one: losses.append(one.loss))
    save(racc, out, hyper=objective.hyper, base=model.model)
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "parameters": sum(one.numel() for one in racc.parameters()),
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
    }


def _loaded(name: str) -> LoadedModel:
    return LoadedModel.load(str(bundled_folder(name)), "cpu", "float32")


def _hard(
    hyper: LoadedModel, objective: TrainingObjective, config: CompressorConfig
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return initial prompts (PIPE) where prompts are appended."""
    if config.prompting == "reading" or config.start == "random":
        return None
    ids = torch.tensor(hyper.processor.tokenizer(HARD_PROMPT)["input_ids"])
    counts = config.document_prompts, config.query_prompts
    documents, queries = (sentence_prompts(objective.hyper, ids, count) for count in counts)
    return documents, queries


async def evaluate_folder(
    folder: Path, methods: Sequence[str], limit: int, hyper: str | None
) -> list[dict[str, object]]:
    data = load_benchmark("facts", seed=0, limit=limit)
    settings = Classifier(bundled(), (), sampling=Sampling(max_tokens=MAX_TOKENS))
    rows: list[dict[str, object]] = []
    other = bundled(hyper) if hyper else None
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        for method in plan(
            RunConfig(methods=methods, shots=SHOTS, compressor=folder),
            data,
            empty,
            settings,
            hyper=other,
        ):
            result, _ = await evaluate(data, method)
            rows.append(
                {
                    "method": result.method,
                    "shots": result.shots,
                    "n": result.n,
                    "value": result.value,
                    "low": result.low,
                    "high": result.high,
                    "seconds": result.seconds,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--limit", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    examples = fact_batches()
    for name in args.only.split(","):
        variant, file = VARIANTS[name], args.work / f"{name.replace(' ', '-')}.json"
        if file.exists():
            continue
        examples.hard = variant.hard
        folder = args.work / file.stem
        record = train_variant(variant, examples, folder, args.steps)
        rows = asyncio.run(evaluate_folder(folder, METHODS, args.limit, variant.hyper))
        rows += asyncio.run(evaluate_folder(folder, ("racc-swapped",), CONTROLLED, variant.hyper))
        file.write_text(json.dumps({"variant": name, **record, "rows": rows}, indent=1))
        shown = ", ".join(f"{row['method']} {row['value']:.3f}" for row in rows)
        print(f"{name}: {shown} ({record['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
