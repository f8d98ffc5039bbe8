"""One token per passage (the architecture of xRAG) with the bundled apprentice: `python -m
benchmarks.racc_one_token [--steps N] [--rate R] [--json F]`.

A bridge of two layers is trained on the answers of the bundled compressor's training examples and
evaluated like `bottega eval facts --shots 5`, with the passages of another item as a control. See
docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bottega.bundled import bundled_folder
from bottega.compression import HyperModel, InputBuilder, OneTokenCompressor, PrefixSearcher
from bottega.compression.objective import TrainingConfig, TrainingExample, TrainingObjective
from bottega.compression.prefixes import to_prefix
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods.retrieval import (
    EpisodeRetriever,
    LateInteractionScorer,
    OracleRetriever,
    SwappedRetriever,
    pools,
)
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.runs.runner import MethodResult, evaluate
from bottega.generation import TransformersGenerator, bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Retriever
from bottega.tasks.glyphs import FactTask
from bottega.types import Candidate, Example, Prefix, Query, Sampling
from training.compressor import (
    EPISODES,
    LAYER,
    PASSAGES,
    QUERIES,
    SEED,
    FactSampler,
    fact_batches,
    racc_objective,
)

TRAINING = TrainingConfig(steps=400, learning_rate=1e-3, warmup_steps=50, weight_decay=0.0)
BATCH = 64
Vectors = Mapping[str, Tensor]


def vectors_of(
    method: OneTokenCompressor, hyper: HyperModel, texts: InputBuilder, passages: Sequence[Example]
) -> dict[str, Tensor]:
    """Return vectors of shape (1, width) by passage id."""
    vectors: dict[str, Tensor] = {}
    for start in range(0, len(passages), BATCH):
        batch = passages[start : start + BATCH]
        rows = method.passage_vectors(hyper, texts.passages(batch))
        vectors |= {str(one.query.id): row for one, row in zip(batch, rows, strict=True)}
    return vectors


def train(
    method: OneTokenCompressor,
    objective: TrainingObjective,
    examples: FactSampler,
    vectors: Vectors,
    training: TrainingConfig,
    report: Callable[[int, float], None],
) -> None:
    optimizer = torch.optim.AdamW(method.parameters(), weight_decay=training.weight_decay)
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step)
        batch = examples(step)
        prefix = method(objective.base, stacked(vectors, batch))
        loss = objective.answer_loss(prefix, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(method.parameters(), training.clip)
        optimizer.step()
        report(step, loss.item())


def stacked(vectors: Vectors, examples: Sequence[TrainingExample]) -> Tensor:
    rows = ([vectors[str(one.query.id)] for one in example.passages] for example in examples)
    return torch.stack([torch.cat(row) for row in rows])


def evaluated_methods(
    data: Benchmark, method: OneTokenCompressor, model: TransformersGenerator
) -> list[Method]:
    """Return the methods: passages retrieved as in `concat`, and as in `racc-swapped`."""
    right = {str(item.query.id): item.tags["passage"] for item in data.items}
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        candidates = pools(data, empty)
    inside: dict[str, Retriever] = {
        name: OracleRetriever(pool, right, seed=0) for name, pool in candidates.items()
    }
    found = LateInteractionScorer(EpisodeRetriever(data.episode_of, inside))
    search = PrefixSearcher(
        BridgePrefixer(method, model),
        model,
        prompt=InterleavedPrompter(show_choices=False, repeat_question=False),
        parse=data.parse,
        sampling=Sampling(max_tokens=64),
    )

    def answering(retrieve: Retriever) -> Callable[[Query], Awaitable[Outcome]]:
        async def answer(query: Query) -> Outcome:
            shown = await retrieve(query, PASSAGES)
            return Outcome((await search.search(query, shown, PASSAGES)).answer)

        return answer

    return [
        Method("one-token", PASSAGES, answering(found)),
        Method("one-token-swapped", PASSAGES, answering(SwappedRetriever(found, data))),
    ]


class BridgePrefixer:
    def __init__(self, method: OneTokenCompressor, model: TransformersGenerator) -> None:
        self._method, self._model = method, model

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        passages = [one.example for one in shown]
        return await self._model.run(lambda loaded: self._prefix(loaded, passages))

    def _prefix(self, loaded: LoadedModel, passages: Sequence[Example]) -> Prefix:
        texts = InputBuilder(loaded.encode, loaded.ends)
        hyper = HyperModel(loaded.model, layer=LAYER)
        with torch.inference_mode():
            rows = self._method.passage_vectors(hyper, texts.passages(passages))
            return to_prefix(self._method(loaded.model, rows.transpose(0, 1)))


async def measured(data: Benchmark, method: OneTokenCompressor) -> list[MethodResult]:
    return [(await evaluate(data, one))[0] for one in evaluated_methods(data, method, bundled())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=TRAINING.steps)
    parser.add_argument("--rate", type=float, default=TRAINING.learning_rate)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaded = LoadedModel.load(str(bundled_folder("apprentice")), "cpu", "float32")
    objective, examples = racc_objective(loaded), fact_batches()
    method = OneTokenCompressor(objective.hyper.width)
    candidates = FactTask(queries=QUERIES, episodes=EPISODES).generate(SEED).knowledge
    vectors = vectors_of(method, objective.hyper, objective.inputs, candidates)
    method.calibrate(torch.stack(list(vectors.values())))
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    training = replace(TRAINING, steps=options.steps, learning_rate=options.rate)
    train(method, objective, examples, vectors, training, report)
    seconds = time.perf_counter() - began
    data = load_benchmark("facts", seed=0, limit=options.limit)
    results = asyncio.run(measured(data, method.eval()))
    for one in results:
        print(f"{one.method}: {one.value:.3f} [{one.low:.3f}, {one.high:.3f}], n = {one.n}")
    last = sum(losses[-20:]) / len(losses[-20:])
    print(f"{options.steps} steps in {seconds:.0f} s, loss {losses[0]:.3f} -> {last:.3f}")
    if options.json:
        names = ("method", "n", "value", "low", "high")
        rows = [{name: getattr(one, name) for name in names} for one in results]
        record = {
            "steps": options.steps,
            "seconds": seconds,
            "first": losses[0],
            "last": last,
        }
        options.json.write_text(json.dumps({**record, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
