"""Demonstrations compressed into a prefix of the bundled apprentice: `python -m
benchmarks.racc_demonstrations --work DIR [--only NAME,...]`.

RACC compresses passages. This experiment compresses scenes with a question and an invented word as
the answer (`attributes`), eight per question. Training uses other words and scenes than evaluation.
Each variant has one JSON file; existing files are not computed again. See docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.racc_start import MemoizedObjective, initialize
from bottega.bundled import bundled_folder
from bottega.compression import CompressorConfig, save
from bottega.compression.objective import TrainingConfig, TrainingExample
from bottega.compression.training import train
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.retrieval import (
    RescoredRetriever,
    SwappedRetriever,
    nearest_retriever,
)
from bottega.evaluation.methods.searchers import GOLD_SCORE
from bottega.evaluation.methods.training_data import RetrievedPassageSampler
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import DualEmbedder, KnowledgeBase, TokenEmbedder, TowerEmbedder
from bottega.knowledge.embedders.names import BUNDLED
from bottega.kv_prefix import Geometry
from bottega.naming import local_model
from bottega.pipeline import Pipeline
from bottega.protocols import Retriever
from bottega.recipes import Classifier, compression_searcher
from bottega.recipes.racc_store import CompressorFactory, StoreBuilder
from bottega.recipes.racc_training import new_compressor, training_objective
from bottega.types import Candidate, Query, Sampling
from training.compressor import TRAINING as OF_PASSAGES

TASK = "attributes:examples=500,queries=300"
SHOTS, BATCH = 8, 16
SEED, BASES = 20_000, 6  # bases for training, each with its own words; evaluation uses seed 0
LAYER, PROMPTS = 1, 10
CALIBRATION, INITIALIZATION = 48, 900  # examples for the scales, and for the initialization
SHOWN = ("zero-shot", "random", "visual-rag", "vote")
TRAINING = replace(OF_PASSAGES, steps=120, learning_rate=3e-4, warmup_steps=20)


@dataclass(frozen=True)
class Variant:
    """Variant of training. `closed_form` initializes as in `racc_start`, otherwise like the
    bundled compressor. Without a config there is no training.
    """

    closed_form: bool = True
    training: TrainingConfig | None = None


VARIANTS = {
    "likeness": Variant(closed_form=False),
    "discriminant": Variant(),
    "by distance": Variant(training=TRAINING),
    "by answers": Variant(training=replace(TRAINING, answer_weight=1.0, cache_weight=0.0)),
}


class AlternatingBatches:
    """Training batches from several knowledge bases, one per step."""

    def __init__(self, parts: Sequence[RetrievedPassageSampler]) -> None:
        self._parts = parts

    def __call__(self, step: int, /) -> Sequence[TrainingExample]:
        return self._parts[step % len(self._parts)](step)

    def sample(self, count: int) -> list[TrainingExample]:
        each = count // len(self._parts)
        return [example for part in self._parts for example in part.sample(each, -1)]


def base_of(data: Benchmark) -> KnowledgeBase:
    embed = DualEmbedder(TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled())
    knowledge = KnowledgeBase.open(":memory:", embed=embed)
    knowledge.add(data.knowledge)
    return knowledge


def training_data(task: str = TASK, bases: int = BASES, shots: int = SHOTS) -> AlternatingBatches:
    parts = []
    for seed in range(SEED, SEED + bases):
        data = load_benchmark(task, seed=seed)
        retrieve = nearest_retriever(data, base_of(data))
        parts.append(
            RetrievedPassageSampler(data, data.items, retrieve, seed=seed, shots=shots, batch=BATCH)
        )
    return AlternatingBatches(parts)


def train_variant(variant: Variant, examples: AlternatingBatches, out: Path) -> dict[str, object]:
    model = LoadedModel.load(str(bundled_folder("apprentice")), "cpu", "float32")
    objective = MemoizedObjective(**vars(training_objective(model, layer=LAYER)))
    config = CompressorConfig(
        objective.hyper.width, Geometry.of(model.model), PROMPTS, PROMPTS, prompting="reading"
    )
    racc, started = new_compressor(config, objective), time.process_time()
    if variant.closed_form:
        objective.calibrate(racc, examples.sample(CALIBRATION))
        initialize(racc, objective, examples.sample(INITIALIZATION))
    else:
        objective.calibrate(racc, examples.sample(INITIALIZATION // 3))
    initialized, losses = time.process_time(), list[float]()
    if variant.training is not None:
        train(
            racc, objective, examples, variant.training, report=lambda one: losses.append(one.loss)
        )
    save(racc, out, hyper=objective.hyper, base=model.model)
    return {
        "seconds_to_start": initialized - started,
        "seconds": time.process_time() - initialized,
        "losses": losses,
    }


def stored(knowledge: KnowledgeBase, folder: Path) -> Path:
    """Store of all demonstrations, compressed once."""
    with closing(
        StoreBuilder(
            CompressorFactory(folder, partial(local_model, BUNDLED)), folder / "store", int8=False
        )
    ) as builder:
        builder.build((str(example.id), example) for example in knowledge)
    return folder / "store"


def compressing_methods(
    data: Benchmark, knowledge: KnowledgeBase, folder: Path, shots: int
) -> list[Method]:
    """Return methods with retrieval scores, with oracle scores, with equal scores, and with the
    passages of another question.
    """
    generator, store = bundled(), stored(knowledge, folder)
    retrieve = nearest_retriever(data, knowledge)
    settings = Classifier(generator, (), sampling=Sampling(max_tokens=64))
    right = {item.query.id: item.answer for item in data.items}

    def oracle_score(query: Query, one: Candidate) -> float:
        return GOLD_SCORE * (one.example.answer == right[query.id])

    retrievers: dict[str, Retriever] = {
        "racc": retrieve,
        "racc-oracle": RescoredRetriever(retrieve, oracle_score),
        "racc-flat": RescoredRetriever(retrieve, lambda query, one: 0.0),
        "racc-swapped": SwappedRetriever(retrieve, data),
    }
    methods = []
    for name, retriever in retrievers.items():
        pipeline = replace(settings.pipeline(retriever, shots), parse=data.parse)
        search = compression_searcher(
            folder,
            generator,
            store=store,
            prompt=pipeline.prompt,
            parse=data.parse,
            sampling=pipeline.sampling,
        )
        methods.append(Method(name, shots, _answering(replace(pipeline, search=search))))
    return methods


def _answering(pipeline: Pipeline) -> Callable[[Query], Awaitable[Outcome]]:
    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return answer


def evaluate_methods(data: Benchmark, methods: Sequence[Method]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for method in methods:
        result, scored = asyncio.run(evaluate(data, method, RunConfig()))
        record = {name: getattr(result, name) for name in ("method", "shots", "n", "value")}
        record |= {name: getattr(result, name) for name in ("low", "high", "seconds")}
        record["prompt_tokens"] = sum(one.prompt_tokens for one in scored) / len(scored)
        rows.append(record)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--shots", type=int, default=SHOTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    data = load_benchmark(args.task, seed=0)
    knowledge = base_of(data)
    baselines = args.work / "shown.json"
    if not baselines.exists():
        settings = Classifier(bundled(), data.labels)
        methods = plan(RunConfig(methods=SHOWN, shots=(1, args.shots)), data, knowledge, settings)
        _write(baselines, {"rows": evaluate_methods(data, methods)})
    examples: AlternatingBatches | None = None
    for name in args.only.split(","):
        file = args.work / f"{name.replace(' ', '-')}.json"
        if file.exists():
            continue
        folder = args.work / file.stem
        log = folder / "training.json"
        if not log.exists():
            examples = examples or training_data(args.task, shots=args.shots)
            log.write_text(json.dumps(train_variant(VARIANTS[name], examples, folder)))
        methods = compressing_methods(data, knowledge, folder, args.shots)
        record = json.loads(log.read_text())
        _write(file, {"variant": name, **record, "rows": evaluate_methods(data, methods)})


def _write(file: Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record, indent=1))
    shown = ", ".join(
        f"{row['method']} {row['shots']}: {row['value']:.3f}" for row in record["rows"]
    )
    print(f"{file.stem} ({record.get('seconds', 0):.0f} s): {shown}", flush=True)


if __name__ == "__main__":
    main()
