"""RACC where only scores identify the right passage: `python -m benchmarks.racc_scores --work DIR`.

In `contradictions`, two passages about a name and a relation state different things. The right one
has the higher score with a given probability, the reliability. Compressors with and without RGCA
start from the bundled one and are trained for each reliability and seed. DIR stores the answers of
each compressor, so a stopped run resumes. See docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bottega._util.durable_files import replace_file
from bottega.bundled import bundled_compressor, bundled_folder
from bottega.compression import RaccModel, save
from bottega.compression.objective import TrainingConfig, retrieval_scores
from bottega.compression.persistence import load
from bottega.compression.training import train
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.training_data import GoldPassageSampler
from bottega.evaluation.metrics.intervals import Estimate, accuracy, paired_difference
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.types import Sampling
from training.compressor import racc_objective

RELIABILITIES, SEEDS = (0.5, 0.7, 0.9), (0, 1, 2)
TASK = "contradictions:reliability={}"
TRAINING_TASK = "contradictions:queries=100,episodes=6,reliability={}"
SEED = 30_000  # of the first training; evaluation uses SEEDS
PASSAGES, BATCH, CALIBRATION = 2, 32, 512
MAX_TOKENS = 24  # tokens of a reply; answers have fewer
TRAINING = TrainingConfig(
    steps=80,
    learning_rate=3e-4,
    warmup_steps=10,
    weight_decay=0.0,
    answer_weight=0.0,
    cache_weight=1.0,
    prdb=False,
)
# Methods and shots of the baselines. One shot is the passage with the highest score.
BASELINES = (("concat", 1), ("concat", PASSAGES), ("candidates", PASSAGES))
HIGHEST, BASELINE, WITHOUT = "highest score", "baselines", "without RGCA"
HEAD = (
    "| | accuracy | equal scores | minus equal scores | minus without RGCA | by seed | strength |"
)
Scores = dict[str, list[bool]]


@dataclass(frozen=True)
class Variant:
    """Difference from the bundled compressor. `strength` is the initial strength of the scores, and
    `rate` a factor of its learning rate. Unless `trained`, only the temperature is calibrated."""

    rgca: bool = True
    strength: float | None = None
    rate: float = 1.0
    trained: bool = True


VARIANTS = {
    WITHOUT: Variant(rgca=False),
    "RGCA": Variant(),
    "RGCA, learned strength": Variant(rate=1000.0),
    "RGCA, strength 20": Variant(strength=20.0),
    "untrained": Variant(trained=False),
    "untrained, strength 20": Variant(strength=20.0, trained=False),
}


class ScaledParameter(nn.Module):
    """Parametrization by a `factor` of a smaller parameter. Adam changes both by equal amounts, so
    the result has `factor` times the learning rate."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, small: Tensor) -> Tensor:
        return small * self.factor

    def right_inverse(self, large: Tensor) -> Tensor:
        return large / self.factor


def sampler(task: str, seed: int) -> GoldPassageSampler:
    data = load_benchmark(task, seed=seed)
    return GoldPassageSampler(
        data.items,
        data.knowledge,
        seed=seed,
        shots=PASSAGES,
        hard=0.0,
        batch=BATCH,
        scores=data.passage_scores,
    )


def train_variant(
    variant: Variant, examples: GoldPassageSampler, config: TrainingConfig, out: Path
) -> dict[str, object]:
    """Train a compressor from the bundled one, save it and return the record of its training."""
    started, losses = time.process_time(), list[float]()
    model = LoadedModel.load(str(bundled_folder("apprentice")), "cpu", "float32")
    objective, saved = racc_objective(model), load(bundled_compressor())
    racc = RaccModel(replace(saved.racc.config, rgca=variant.rgca))
    racc.load_state_dict(saved.racc.state_dict())
    aggregator = racc.aggregator
    aggregator.calibrate(retrieval_scores(examples.sample(CALIBRATION, -1)))
    if variant.strength is not None:
        aggregator.strength.data.fill_(variant.strength)
    if variant.trained:
        parametrize.register_parametrization(aggregator, "strength", ScaledParameter(variant.rate))
        train(racc, objective, examples, config, report=lambda one: losses.append(one.loss))
        parametrize.remove_parametrizations(aggregator, "strength")
    save(racc, out, hyper=objective.hyper, base=model.model, tokenizers=objective.tokenizers)
    return {
        "seconds": time.process_time() - started,
        "losses": losses,
        "strength": aggregator.strength.item(),
        "temperature": aggregator.log_temperature.exp().item(),
    }


def evaluate_methods(
    data: Benchmark, methods: Sequence[str], shots: int, folder: Path | None = None
) -> Scores:
    """Return whether each method answers each item correctly."""
    settings = Classifier(bundled(), (), sampling=Sampling(max_tokens=MAX_TOKENS))
    config, scores = RunConfig(methods=methods, shots=(shots,), compressor=folder), Scores()
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        for method in plan(config, data, empty, settings):
            _, answers = asyncio.run(evaluate(data, method, config))
            scores[method.title] = [one.correct for one in answers]
    return scores


def evaluate_baselines(data: Benchmark) -> Scores:
    """Return the scores of the baselines and of a reader that knows the passages and takes the one
    with the highest score."""
    found = Scores()
    for item in data.items:
        scores = data.passage_scores[str(item.query.id)]
        best = max(scores, key=lambda id: scores[id])
        found.setdefault(HIGHEST, []).append(best == item.tags["passage"])
    for method, shots in BASELINES:
        found |= evaluate_methods(data, [method], shots)
    return found


@dataclass(frozen=True)
class Experiment:
    """Answers of the baselines and variants for each reliability and seed, in the folder `work`."""

    work: Path
    names: Sequence[str] = tuple(VARIANTS)
    seeds: Sequence[int] = SEEDS
    limit: int = 150
    training: TrainingConfig = TRAINING

    def measure(self) -> None:
        """Measure what `work` lacks."""
        for seed in self.seeds:
            for reliability in RELIABILITIES:
                data = load_benchmark(TASK.format(reliability), seed=seed, limit=self.limit)
                if not (file := self.file(BASELINE, reliability, seed)).exists():
                    _write(file, {"scores": evaluate_baselines(data)})
                for name in self.names:
                    if not (file := self.file(name, reliability, seed)).exists():
                        examples = sampler(TRAINING_TASK.format(reliability), SEED + seed)
                        _write(file, self._measured(VARIANTS[name], data, examples, file))

    def _measured(
        self, variant: Variant, data: Benchmark, examples: GoldPassageSampler, file: Path
    ) -> dict[str, Any]:
        folder = self.work / file.stem
        record = train_variant(variant, examples, self.training, folder)
        scores = evaluate_methods(data, ["racc", "racc-flat"], PASSAGES, folder)
        return {**record, "scores": scores}

    def file(self, name: str, reliability: float, seed: int) -> Path:
        if name == WITHOUT:  # ignores scores: its answers are the same for every reliability
            reliability = RELIABILITIES[-1]
        return self.work / f"{name.replace(',', '').replace(' ', '-')}-{reliability}-{seed}.json"

    def tables(self) -> Iterator[str]:
        """Yield the lines of a table for each reliability, over the items of all seeds."""
        for reliability in RELIABILITIES:
            yield from (f"\nReliability {reliability}, n = {self.limit * len(self.seeds)}:\n", HEAD)
            yield "|" + "---|" * (HEAD.count("|") - 1)
            baselines = self._read(BASELINE, reliability)
            for name in baselines[0]["scores"]:
                correct = [one["scores"][name] for one in baselines]
                yield _row(name, _shown(correct), "", "", "", _by_seed(correct), "")
            for name in self.names:
                yield self._variant_row(name, reliability)

    def _variant_row(self, name: str, reliability: float) -> str:
        records = self._read(name, reliability)
        guided, flat, none = (
            [one["scores"][f"{method} {PASSAGES}"] for one in found]
            for method, found in (
                ("racc", records),
                ("racc-flat", records),
                ("racc", self._read(WITHOUT, reliability)),
            )
        )
        strengths = " ".join(f"{one['strength']:.1f}" for one in records)
        return _row(
            name,
            _shown(guided),
            _shown(flat),
            _difference(guided, flat),
            "" if name == WITHOUT else _difference(guided, none),
            _by_seed(guided),
            "" if name == WITHOUT else strengths,
        )

    def _read(self, name: str, reliability: float) -> list[dict[str, Any]]:
        files = [self.file(name, reliability, seed) for seed in self.seeds]
        return [json.loads(file.read_text()) for file in files]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _pooled(by_seed: Sequence[Sequence[bool]]) -> list[bool]:
    return [one for scores in by_seed for one in scores]


def _shown(by_seed: Sequence[Sequence[bool]]) -> str:
    return _with_interval(accuracy(_pooled(by_seed)), "")


def _difference(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> str:
    return _with_interval(paired_difference(_pooled(ours), _pooled(theirs)), "+")


def _with_interval(one: Estimate, sign: str) -> str:
    return f"{one.value:{sign}.3f} [{one.low:{sign}.3f}, {one.high:{sign}.3f}]"


def _by_seed(by_seed: Sequence[Sequence[bool]]) -> str:
    return " ".join(f"{accuracy(scores).value:.3f}" for scores in by_seed)


def _write(file: Path, record: dict[str, Any]) -> None:
    shown = {name: round(accuracy(scores).value, 3) for name, scores in record["scores"].items()}
    replace_file(file, json.dumps(record).encode())
    print(f"{file.stem}: {shown}, {record.get('seconds', 0):.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=Experiment.limit, help="items per seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(args.work, limit=args.limit)
    experiment.measure()
    print(*experiment.tables(), sep="\n")


if __name__ == "__main__":
    main()
