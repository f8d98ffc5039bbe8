"""Runs as `bottega eval --out` keeps them, of made-up answers to small pictures."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from bottega.errors import EndpointTimeoutError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.run_store import FILE, RunStore
from bottega.evaluation.runner import RunState, evaluate
from bottega.image import Image
from bottega.types import Answer, Candidate, Completion, Example, Prompt, Query, Reply, Trace, Usage

LABELS = ("cat", "dog", "owl", "newt")
SUBJECTS = ("fur", "feathers", "water")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>& 'quoted' {{ 7 * 7 }}"


def drawn(seed: int, side: int = 96) -> Image:
    """A picture of soft colours, about as compressible as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Pillow.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
    return Image.from_pillow(coarse.resize((side, side), Pillow.Resampling.BICUBIC))


def benchmark(items: int, known: int = 40, side: int = 96) -> Benchmark:
    """The first item is hostile in every text of its own."""
    made = [_example(i, side) for i in range(items + known)]
    query = replace(made[0].query, text=f"Which animal? {HOSTILE}", choices=(HOSTILE, *LABELS))
    made[0] = replace(made[0], query=query, answer=HOSTILE, tags={"subject": HOSTILE})
    return Benchmark("animals", tuple(made[items:]), tuple(made[:items]), (*LABELS, HOSTILE))


def _example(i: int, side: int) -> Example:
    tags = {"subject": SUBJECTS[i % 3]}
    query = Query(f"Which animal is number {i}?", (drawn(i, side),), id=f"q{i}")
    return Example(query, LABELS[i % 4], tags=tags, id=f"e{i}")


def answering(
    data: Benchmark,
    right: float,
    shots: int,
    *,
    failing: Sequence[int] = (),
    invalid: Sequence[int] = (),
    usd: float | None = 0.001,
) -> Callable[[Query], Awaitable[Outcome]]:
    """Right for that share of the items, drawn by their places."""
    places = {item.query.id: place for place, item in enumerate(data.items)}

    async def answer(query: Query) -> Outcome:
        place = places[query.id]
        if place in failing:
            raise EndpointTimeoutError(f"the endpoint was too slow {HOSTILE}")
        rng = random.Random(place + 7919 * shots)
        truth = data.items[place].answer
        label = truth if rng.random() < right else rng.choice(LABELS)
        reply = f"I look at it {HOSTILE}\nAnswer: {label}"
        said = Answer(label, place not in invalid, (label,), rng.random(), "I look at it")
        shown = tuple(Candidate(one, rng.random()) for one in rng.sample(data.knowledge, shots))
        usage = Usage(100 * (1 + shots), 12)
        told = Reply("m", (Completion(reply),), usage, 0.5)
        cost = None if usd is None else usd * (1 + shots)
        trace = Trace(f"{place:016x}", 0.0, query, "t", shown, Prompt(()), told, said, 0.6, cost)
        return Outcome(said, trace)

    return answer


async def kept(
    folder: Path, data: Benchmark, methods: Sequence[Method], **settings: object
) -> Path:
    """Everything as the command keeps it; returns the folder."""
    asked = {"benchmark": data.name, "model": "m", "seed": 0, "metrics": ["accuracy"]} | settings
    with closing(RunStore.open(folder, asked, data.items)) as ledger:
        for method in methods:
            await evaluate(data, method, RunConfig(concurrency=256), RunState(ledger))
            keep_thumbnails(folder / FILE, data, method)
    return folder


def three_methods(data: Benchmark) -> list[Method]:
    return [
        Method("zero-shot", 0, answering(data, 0.3, 0, invalid=(4, 5))),
        Method("random", 3, answering(data, 0.5, 3, failing=(2,))),
        Method("top-k", 3, answering(data, 0.8, 3)),
    ]
