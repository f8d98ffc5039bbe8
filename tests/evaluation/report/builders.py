"""Stored runs, as `bottega eval --out` writes them, with simulated answers to small images."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from bottega.errors import EndpointTimeoutError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.evaluation.streams.stream_plan import StreamConfig
from bottega.image import Image
from bottega.types import Answer, Candidate, Completion, Example, Prompt, Query, Reply, Trace, Usage

LABELS = ("cat", "dog", "owl", "newt")
SUBJECTS = ("fur", "feathers", "water")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>& 'quoted' {{ 7 * 7 }}"


def noise_image(seed: int, side: int = 96) -> Image:
    """Return a smooth noise image, about as compressible as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Pillow.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
    return Image.from_pillow(coarse.resize((side, side), Pillow.Resampling.BICUBIC))


def benchmark(items: int, examples: int = 40, side: int = 96) -> Benchmark:
    """Return a benchmark whose first item has markup in every text."""
    generated = [_example(i, side) for i in range(items + examples)]
    query = replace(generated[0].query, text=f"Which animal? {HOSTILE}", choices=(HOSTILE, *LABELS))
    generated[0] = replace(generated[0], query=query, answer=HOSTILE, tags={"subject": HOSTILE})
    return Benchmark(
        "animals", tuple(generated[items:]), tuple(generated[:items]), (*LABELS, HOSTILE)
    )


def _example(i: int, side: int) -> Example:
    tags = {"subject": SUBJECTS[i % 3]}
    query = Query(f"Which animal is number {i}?", (noise_image(i, side),), id=f"q{i}")
    return Example(query, LABELS[i % 4], tags=tags, id=f"e{i}")


def simulated_answers(
    data: Benchmark,
    accuracy: float,
    shots: int,
    *,
    failing: Sequence[int] = (),
    invalid: Sequence[int] = (),
    usd: float | None = 0.001,
) -> Callable[[Query], Awaitable[Outcome]]:
    """Return an answer function with this accuracy, sampled by item index."""
    indices = {item.query.id: index for index, item in enumerate(data.items)}

    async def answer(query: Query) -> Outcome:
        index = indices[query.id]
        if index in failing:
            raise EndpointTimeoutError(f"the endpoint was too slow {HOSTILE}")
        rng = random.Random(index + 7919 * shots)
        truth = data.items[index].answer
        label = truth if rng.random() < accuracy else rng.choice(LABELS)
        reply = f"I look at it {HOSTILE}\nAnswer: {label}"
        parsed = Answer(label, index not in invalid, (label,), rng.random(), "I look at it")
        shown = tuple(Candidate(one, rng.random()) for one in rng.sample(data.knowledge, shots))
        usage = Usage(100 * (1 + shots), 12)
        model_reply = Reply("m", (Completion(reply),), usage, 0.5)
        cost = None if usd is None else usd * (1 + shots)
        trace = Trace(
            f"{index:016x}", 0.0, query, "t", shown, Prompt(()), model_reply, parsed, 0.6, cost
        )
        return Outcome(parsed, trace)

    return answer


async def store_run(
    folder: Path, data: Benchmark, methods: Sequence[Method], **settings: object
) -> Path:
    """Store a run as the command does; return its folder."""
    run_settings = {
        "benchmark": data.name,
        "model": "m",
        "seed": 0,
        "metrics": ["accuracy"],
    } | settings
    with closing(RunStore.open(folder, run_settings, data.items)) as ledger:
        for method in methods:
            await evaluate(data, method, RunConfig(concurrency=256), RunState(ledger))
            keep_thumbnails(folder / FILE, data, method)
    return folder


def three_methods(data: Benchmark) -> list[Method]:
    return [
        Method("zero-shot", 0, simulated_answers(data, 0.3, 0, invalid=(4, 5))),
        Method("random", 3, simulated_answers(data, 0.5, 3, failing=(2,))),
        Method("top-k", 3, simulated_answers(data, 0.8, 3)),
    ]


async def store_streams(folder: Path, data: Benchmark, **changes: Any) -> StreamConfig:
    """Store a run of streams of which the first one is answered; return its settings."""
    config = StreamConfig(
        data.name,
        tiers=("small", "large"),
        router="coin",
        rates=(0.5,),
        starts=("none",),
        retrieve=("image",),
        controls=("no-cache",),
        shots=3,
        orders=1,
        embed="tower",
        embed_text="words",
        evict=("none",),
    )
    config = replace(config, **changes)
    orders = [list(range(len(data.items)))]
    settings = {**config.record(), "metrics": ["accuracy"], "item_orders": orders}
    method = Method(config.streams()[0].name, config.shots, simulated_answers(data, 0.3, 0))
    with closing(RunStore.open(folder, settings, data.items)) as store:
        await evaluate(data, method, RunConfig(), RunState(store))
    return config
