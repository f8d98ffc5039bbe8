"""RACC with the bundled apprentice, for each switch: `python -m benchmarks.racc_quality --work DIR
[--only NAME,...] [--seed N]`, or `--compare NAME,NAME` for the difference of two variants.

Each variant is trained from scratch on the bundled compressor's training examples (fewer steps) and
evaluated like `bottega eval facts`, with its controls. The seed is that of the initial weights, the
training examples and the hidden scores. Each variant and seed has one JSON file; existing files are
not computed again, and an interrupted training resumes. See docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bottega.bundled import bundled_folder
from bottega.compression import save
from bottega.compression.objective import TrainingConfig
from bottega.compression.training import CHECKPOINT, train
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.compressor_plan import PRESETS
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.metrics.intervals import Estimate, paired_difference, paired_mean_difference
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.recipes.racc_training import new_compressor, training_objective
from bottega.types import Sampling
from training.compressor import (
    BATCH,
    LAYER,
    SEED,
    TRAINING,
    FactSampler,
    compressor_config,
    fact_batches,
)

STEPS, SHOTS = 300, (5,)
PAPER_STEPS = 9000  # the paper prints no number; about as many as for OK-VQA in docs/reproduce.md
METHODS = ("racc", "racc-oracle", "racc-flat")
CONTROLLED = 100  # with the passages of others some replies go on to the last token
MAX_TOKENS = 24  # tokens of a reply; answers have fewer
PAPER = PRESETS["paper"]


@dataclass(frozen=True)
class Variant:
    """Difference from the bundled compressor."""

    compressor: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True
    hard: float = 0.5
    hyper: str | None = None
    layer: int = LAYER
    batch: int = BATCH
    steps: int = STEPS


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
        PAPER["compressor"],
        {**PAPER["training"], "weight_decay": TrainingConfig.weight_decay},
        calibrated=False,
        layer=PAPER["layer"],
        batch=PAPER["batch"],
        steps=PAPER_STEPS,
    ),
    "no hard examples": Variant(hard=0.0),
    # Trials of 40 steps, all scores equal, n = 60: 0.77 by layer 1, 0.13 by layer 2, the last.
    "master compresses": Variant(hyper="master", layer=1),
} | {
    f"{count} prompts": Variant({"document_prompts": count, "query_prompts": count})
    for count in (2, 4, 6, 10, 14)
}


def train_variant(
    variant: Variant, examples: FactSampler, out: Path, *, steps: int, seed: int
) -> dict[str, object]:
    model, hyper = _loaded("apprentice"), _loaded(variant.hyper) if variant.hyper else None
    objective = training_objective(model, hyper, layer=variant.layer)
    config = replace(compressor_config(model), width=objective.hyper.width, **variant.compressor)
    racc = new_compressor(config, objective, seed=seed)
    if variant.calibrated and not (out / CHECKPOINT).exists():
        objective.calibrate(racc, examples.sample(512, -1))
    training = replace(TRAINING, steps=steps, seed=seed, **variant.training)
    losses: list[float] = []
    started = time.process_time()
    train(
        racc,
        objective,
        examples,
        training,
        folder=out,
        report=lambda one: losses.append(one.loss),
    )
    save(racc, out, hyper=objective.hyper, base=model.model)
    return {
        "steps": steps,
        "batch": examples.batch,
        "cpu_seconds": time.process_time() - started,
        "parameters": sum(one.numel() for one in racc.parameters()),
        "last_loss": sum(losses[-20:]) / max(1, len(losses[-20:])),
    }


def _loaded(name: str) -> LoadedModel:
    return LoadedModel.load(str(bundled_folder(name)), "cpu", "float32")


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
            result, scored = await evaluate(data, method)
            rows.append(
                {
                    "method": result.method,
                    "shots": result.shots,
                    "n": result.n,
                    "value": result.value,
                    "low": result.low,
                    "high": result.high,
                    "seconds": result.seconds,
                    "correct": [one.scores[0] == 1 for one in scored],
                }
            )
    return rows


def compare(work: Path, name: str, other: str) -> list[dict[str, object]]:
    """Return the paired differences between two variants, for each method and seed and for the mean
    over the seeds of each question, whose interval is a bootstrap over questions."""
    seeds = [
        seed for seed in range(100) if all(_file(work, one, seed).exists() for one in (name, other))
    ]
    rows: list[dict[str, object]] = []
    for method in METHODS:
        ours, theirs = (
            [_correct(_file(work, one, seed), method) for seed in seeds] for one in (name, other)
        )
        pairs = zip(seeds, ours, theirs, strict=True)
        found: list[tuple[object, Estimate]] = [
            (seed, paired_difference(our, their)) for seed, our, their in pairs
        ]
        means = [
            [sum(of) / len(seeds) for of in zip(*each, strict=True)] for each in (ours, theirs)
        ]
        found.append(("all", paired_mean_difference(*means, seed=0)))
        rows += [{"method": method, "seed": seed, **asdict(one)} for seed, one in found]
    return rows


def _correct(file: Path, method: str) -> list[bool]:
    rows = json.loads(file.read_text())["rows"]
    return next(row["correct"] for row in rows if row["method"] == method)


def _file(work: Path, name: str, seed: int) -> Path:
    return work / f"{name.replace(' ', '-')}-seed-{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 300, and 9,000 as in the paper")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--compare", metavar="NAME,NAME", help="compare two trained variants")
    args = parser.parse_args()
    if args.compare:
        for row in compare(args.work, *args.compare.split(",")):
            print(json.dumps(row))
        return
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    examples = fact_batches(seed=SEED + args.seed)
    for name in args.only.split(","):
        variant, file = VARIANTS[name], _file(args.work, name, args.seed)
        if file.exists():
            continue
        examples.hard, examples.batch = variant.hard, variant.batch
        folder, steps = args.work / file.stem, args.steps or variant.steps
        record = train_variant(variant, examples, folder, steps=steps, seed=args.seed)
        rows = asyncio.run(evaluate_folder(folder, METHODS, args.limit, variant.hyper))
        rows += asyncio.run(evaluate_folder(folder, ("racc-swapped",), CONTROLLED, variant.hyper))
        document = {"variant": name, "seed": args.seed, **record, "rows": rows}
        file.write_text(json.dumps(document, indent=1))
        shown = ", ".join(f"{row['method']} {row['value']:.3f}" for row in rows)
        print(f"{name}, seed {args.seed}: {shown} ({record['cpu_seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
