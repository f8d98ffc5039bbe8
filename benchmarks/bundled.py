"""Latency of the bundled model: python benchmarks/bundled.py [--repeats 5]

Visual RAG on digits with ten demonstrations, on one thread: one question at a time, and sixteen at
once; then the embedding of all 1,797 digits. Medians over the repeats. The limits hold on a
quiet machine. The output also gives each time as a number of matrix products of a fixed size, which
depends less on other load.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import torch

from bottega import (
    KnowledgeBase,
    Pipeline,
    Query,
    TowerEmbedder,
    bundled,
    load_digits,
    visual_rag,
)

QUESTIONS, AT_ONCE, SHOTS = 64, 16, 10
LIMITS = {"one question, ms": 60.0, "batched, ms a question": 20.0, "1,797 embeddings, s": 5.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    examples = list(load_digits())
    embedder = TowerEmbedder.bundled(threads=1)
    with KnowledgeBase.open(":memory:", embed=embedder) as knowledge:
        knowledge.add(examples[QUESTIONS:])
        pipeline = visual_rag(
            knowledge,
            bundled(),
            labels=knowledge.labels(),
            shots=SHOTS,
        )
        queries = [example.query for example in examples[:QUESTIONS]]
        everything = [example.query for example in examples]
        pipeline.answer_sync(queries[0])  # loads the model
        measured = {
            "one question, ms": lambda: in_sequence(pipeline, queries) * 1000,
            "batched, ms a question": lambda: batched(pipeline, queries) * 1000,
            "1,797 embeddings, s": lambda: timed(lambda: embedder.embed(everything)),
        }
        product = median(matrix_product, repeats)
        for name, measure in measured.items():
            value = median(measure, repeats)
            products = value / (product * (1 if name.endswith(", s") else 1000))
            print(f"{name:24} {value:8.2f}   limit {LIMITS[name]:<4g} {products:8.3f} products")
    print(f"{'2048 x 2048 product, ms':24} {product * 1000:8.2f}")


def median(measure: Callable[[], float], repeats: int) -> float:
    return statistics.median(measure() for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_sequence(pipeline: Pipeline, queries: list[Query]) -> float:
    """Return seconds per question, retrieval included, for questions in sequence."""

    async def ask() -> None:
        for query in queries:
            await pipeline.answer(query)

    return timed(lambda: asyncio.run(ask())) / len(queries)


def batched(pipeline: Pipeline, queries: list[Query]) -> float:
    async def ask() -> None:
        for start in range(0, len(queries), AT_ONCE):
            await asyncio.gather(*map(pipeline.answer, queries[start : start + AT_ONCE]))

    return timed(lambda: asyncio.run(ask())) / len(queries)


def matrix_product() -> float:
    a = torch.ones(2048, 2048)
    return timed(lambda: a @ a)


if __name__ == "__main__":
    main()
