"""Data of benchmarks/console.py: requests, cached entries, and a run of an evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from benchmarks.gateway_cases import TEAM, question
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE, Entry
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.recording import TraceStore
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Example,
    Message,
    Prompt,
    Query,
    Reply,
    Trace,
    Usage,
)

PERIOD = 30 * 86_400
LABELS = ("tabby", "pug", "parrot", "goldfish")
METHODS = (
    *(("zero-shot", 0), ("random", 4), ("random", 16)),
    *(("top-k", 4), ("top-k", 16), ("vote", 16)),
)
KNOWLEDGE = 200


def fill_ledger(data: Path, requests: int) -> None:
    """Fill the ledger and the traces with requests of the last 30 days."""
    rng = np.random.default_rng(0)
    now = time.time()
    moments = np.sort(now - rng.random(requests) * PERIOD)
    states = rng.choice(["answered", "replayed", "failed"], requests, p=[0.8, 0.17, 0.03])
    is_master = rng.random(requests) < 0.2
    with contextlib.closing(Ledger(data / FILE)) as ledger:
        ledger.set_master("master")
        for i, moment in enumerate(moments):
            state = str(states[i])
            ledger.record(
                Entry(
                    float(moment),
                    f"req_{i:032x}",
                    "",
                    TEAM,
                    "master" if is_master[i] else "apprentice",
                    "mock",
                    state,  # type: ignore[arg-type]
                    shots=0 if is_master[i] else 2,
                    similarity=float(rng.random()),
                    prompt_tokens=300,
                    completion_tokens=20,
                    cost_usd=float(rng.random()) * 1e-3 if state == "answered" else 0.0,
                    seconds=float(rng.lognormal(-1, 0.5)),
                    status=502 if state == "failed" else 200,
                )
            )
            if i % 5_000 == 0:
                ledger.flush()
    with contextlib.closing(TraceStore.open(data / "traces.db")) as traces:
        for start in range(0, requests, 2_000):
            batch = [
                trace(i, float(moments[i])) for i in range(start, min(start + 2_000, requests))
            ]
            traces.write(batch, namespace=TEAM)


def trace(number: int, moment: float) -> Trace:
    query = Query(f"Case {number}: what is on the left side of this picture?")
    text = f"A {LABELS[number % len(LABELS)]}, and it is brown."
    reply = Reply("mock", (Completion(text),), Usage(300, 20))
    prompt = Prompt((Message("user", (query.text,)),))
    return Trace(
        id=f"req_{number:032x}",
        time=moment,
        query=query,
        tier="apprentice",
        candidates=(),
        prompt=prompt,
        reply=reply,
        answer=Answer(text),
        seconds=0.4,
        cost_usd=1e-4,
    )


def fill_cache(file: Path, entries: int) -> None:
    rng = np.random.default_rng(0)
    with KnowledgeBase.open(file, PixelEmbedder(), namespace=TEAM) as cache:
        cache.add(
            Example(question(number, rng), LABELS[number % len(LABELS)])
            for number in range(entries)
        )


def store_run(folder: Path, items: int) -> None:
    """Store a run of `METHODS` with simulated answers, which show examples without images."""
    known = tuple(
        Example(Query(f"Known {i}: which animal?"), LABELS[i % len(LABELS)], id=f"known-{i}")
        for i in range(KNOWLEDGE)
    )
    asked = tuple(
        Example(Query(f"Case {i}: which animal?", id=str(i)), LABELS[i % len(LABELS)])
        for i in range(items)
    )
    data = Benchmark("animals", known, asked, LABELS)
    settings = {"benchmark": data.name, "model": "mock", "seed": 0, "metrics": ["accuracy"]}
    with contextlib.closing(RunStore.open(folder, settings, data.items)) as store:
        for name, shots in METHODS:
            method = Method(name, shots, simulated(data, shots))
            asyncio.run(evaluate(data, method, RunConfig(concurrency=256), RunState(store)))


def simulated(data: Benchmark, shots: int) -> Callable[[Query], Awaitable[Outcome]]:
    """Return an answer function, better with more shots. A quarter of its answers has no
    confidence."""

    async def answer(query: Query) -> Outcome:
        index = int(query.id or 0)
        rng = random.Random(f"{index} {shots}")
        right = rng.random() < 0.5 + shots / 50
        label = data.items[index].answer if right else rng.choice(LABELS)
        shown = tuple(Candidate(one, rng.random()) for one in rng.sample(data.knowledge, shots))
        turns = [(one.example.query.text, one.example.answer) for one in shown]
        messages = [
            message
            for question, known in turns
            for message in (Message("user", (question,)), Message("assistant", (known,)))
        ]
        prompt = Prompt((*messages, Message("user", (query.text,))))
        confidence = rng.random() if index % 4 else None
        found = Answer(label, labels=(label,), confidence=confidence)
        reply = Reply("mock", (Completion(f"Answer: {label}"),), Usage(100 * (1 + shots), 12), 0.5)
        made = Trace(f"{index:016x}", 0.0, query, "t", shown, prompt, reply, found, 0.6, 1e-4)
        return Outcome(found, made)

    return answer
