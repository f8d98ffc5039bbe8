"""Costs and accuracy of stored passages with the bundled compressor: `python -m
benchmarks.racc_stored [--limit 500] [--json F]`.

Reports accuracy on `facts` with passages compressed in the request, stored as fp16 and stored as
int8; seconds per answer, sequentially, with alternating methods; and bytes per passage, including
its images as in the paper. This is the paper's Table 3 on a small scale. See
docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bottega.bundled import bundled_compressor
from bottega.compression import InputBuilder, PassageCompressor, PassageStore, StoreManifest, load
from bottega.compression.passage_store import Precision
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import TransformersGenerator, bundled
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.recipes.racc_store import source_bytes
from bottega.types import Sampling

SHOTS, MOST = 5, 24
PRECISIONS: tuple[Precision, ...] = ("fp16", "int8")
CONCAT, ONLINE = "concat", "racc, compressed in the request"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--timed", type=int, default=60, help="number of timed questions")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = asyncio.run(_measured(options.limit, options.timed))
    print(json.dumps(record, indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


async def _measured(limit: int, timed: int) -> dict[str, object]:
    data = load_benchmark("facts", seed=0, limit=limit)
    model = bundled()
    await model.load()
    with tempfile.TemporaryDirectory() as folder:
        stores = {kind: built(Path(folder) / kind, data, model, kind) for kind in PRECISIONS}
        ways = planned(data, model, {kind: Path(folder) / kind for kind in PRECISIONS})
        accuracy = {name: await answered(data, way) for name, way in ways.items()}
        seconds = await take_turns(data, ways, timed)
    sizes = map(statistics.mean, zip(*map(source_bytes, data.knowledge), strict=True))
    bytes_per_passage: dict[str, float] = dict(zip(("text", "images"), sizes, strict=True))
    bytes_per_passage |= {kind: store.bytes_per_passage for kind, store in stores.items()}
    return {"accuracy": accuracy, "seconds": seconds, "bytes a passage": bytes_per_passage}


def built(
    folder: Path, data: Benchmark, model: TransformersGenerator, kind: Precision
) -> PassageStore:
    saved, loaded = load(bundled_compressor()), model.loaded
    config = saved.racc.config
    texts = InputBuilder(loaded.encode, loaded.ends)
    condenser = PassageCompressor(saved.racc, saved.open_hyper(loaded.model), texts)
    manifest = StoreManifest(saved.digest, config.document_prompts, config.width, kind)
    store = PassageStore(folder, manifest)
    passages = [(str(one.id or one.query.id), one) for one in data.knowledge]
    store.add(passages, condenser.compress)
    return store


def planned(
    data: Benchmark, model: TransformersGenerator, stores: Mapping[Precision, Path]
) -> dict[str, Method]:
    settings = Classifier(model, (), sampling=Sampling(max_tokens=MOST))

    def way(name: str, store: Path | None = None) -> Method:
        with KnowledgeBase.open(":memory:", embed=None) as empty:
            return plan(
                RunConfig(methods=[name], shots=(SHOTS,), store=store), data, empty, settings
            )[0]

    ways = {CONCAT: way("concat"), ONLINE: way("racc")}
    return ways | {f"racc, stored as {kind}": way("racc", at) for kind, at in stores.items()}


async def answered(data: Benchmark, way: Method) -> dict[str, object]:
    result, _ = await evaluate(data, way)
    return {"n": result.n, "value": result.value, "low": result.low, "high": result.high}


async def take_turns(
    data: Benchmark, ways: Mapping[str, Method], timed: int
) -> dict[str, dict[str, float]]:
    """Return median seconds, and the median ratios to concatenation within each question."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn, item in enumerate(data.items[:timed]):
        for position in range(len(names)):
            name = names[(position + turn) % len(names)]
            began = time.perf_counter()
            await ways[name].answer(item.query)
            taken[name].append(time.perf_counter() - began)
    return {
        name: {"seconds": statistics.median(of), **_ratio(of, taken)} for name, of in taken.items()
    }


def _ratio(of: Sequence[float], taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    ratios = [concat / one for concat, one in zip(taken[CONCAT], of, strict=True)]
    return {"times faster": statistics.median(ratios)}


if __name__ == "__main__":
    main()
