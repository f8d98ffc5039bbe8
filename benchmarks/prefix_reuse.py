"""Savings from reading shared prompt prefixes once: python benchmarks/prefix_reuse.py [--queries
10]

The requests of RCTS queries (the synthetic task `attributes`, 3 shots, the paper's reward) are
recorded in waves with the bundled apprentice, and sent again with and without prefix reuse.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from bottega import DualEmbedder, KnowledgeBase, TokenEmbedder, TowerEmbedder, bundled
from bottega.bundled import bundled_folder
from bottega.generation import TransformersGenerator
from bottega.protocols import Generator
from bottega.recipes import rcts
from bottega.tasks.attributes import AttributeTask
from bottega.types import Prompt, Reply, Sampling

SHOTS, SEED = 3, 0
DECODER = {"num_hidden_layers": 14, "hidden_size": 640, "intermediate_size": 1728}
HEADS = {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64}

Wave = list[tuple[Prompt, Sampling]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="concurrent branches")
    parser.add_argument("--cache-mb", type=int, default=256)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    waves = asyncio.run(recorded(chosen.queries, chosen.parallel))
    requests = sum(map(len, waves))
    print(f"{chosen.queries} queries, {requests} requests in {len(waves)} waves")
    apprentice = bundled_folder("apprentice")
    compare("apprentice", apprentice, waves, chosen.repeats, chosen.cache_mb)
    with tempfile.TemporaryDirectory() as folder:
        larger(apprentice, Path(folder))
        short = [[(prompt, replace(how, max_tokens=4)) for prompt, how in wave] for wave in waves]
        compare("70 M, random", Path(folder), short, chosen.repeats, chosen.cache_mb)


class Recording:
    """Generator that records requests in waves. A wave ends when its first request is answered."""

    def __init__(self, inner: Generator) -> None:
        self.name, self.turns_only = inner.name, True
        self.waves: list[Wave] = []
        self._answered = True
        self._inner = inner

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._answered:
            self.waves.append([])
        self._answered = False
        self.waves[-1].append((prompt, sampling))
        reply = await self._inner.generate(prompt, sampling)
        self._answered = True
        return reply

    async def aclose(self) -> None:
        await self._inner.aclose()


async def recorded(queries: int, parallel: int) -> list[Wave]:
    task = AttributeTask(examples=500, queries=max(queries, 50)).generate(SEED)
    embed = DualEmbedder(TowerEmbedder.bundled(), TokenEmbedder.bundled())
    with KnowledgeBase.open(":memory:", embed=embed) as knowledge:
        knowledge.add(task.knowledge)
        generator = Recording(bundled())
        pipeline = rcts(
            knowledge, generator, labels=task.labels, shots=SHOTS, parallel=parallel, seed=SEED
        )
        for item in task.items[:queries]:
            await pipeline.answer(item.query)
        await generator.aclose()
    return generator.waves


@dataclass
class Timings:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: int = 0
    prompts: int = 0
    said: list[str] = field(default_factory=list)


def compare(name: str, folder: Path, waves: Sequence[Wave], repeats: int, cache_mb: int) -> None:
    every, once = Timings(), Timings()
    for _ in range(repeats):
        for keep, into in ((0, every), (cache_mb, once)):
            asyncio.run(sent(folder, waves, keep, into))
    assert once.prompts == every.prompts
    print(f"{name}: {every.prompts:,} tokens of prompts")
    for way, one in (("every time", every), ("once", once)):
        wall, cpu = statistics.median(one.wall), statistics.median(one.cpu)
        print(f"  read {way:10} {one.tokens:9,} tokens {cpu:8.2f} s CPU {wall:8.2f} s")
    tokens = once.tokens / every.tokens
    print(
        f"  ratio {tokens:19.3f} {ratio(once.cpu, every.cpu):15.3f} "
        f"{ratio(once.wall, every.wall):14.3f}"
    )
    same = sum(one == other for one, other in zip(once.said, every.said, strict=True))
    print(f"  the same answer {same:,} of {len(every.said):,}")


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


async def sent(folder: Path, waves: Sequence[Wave], keep: int, into: Timings) -> None:
    generator = TransformersGenerator(folder, device="cpu", threads=1, prefix_cache_mb=keep)
    await generator.load()
    into.tokens = into.prompts = 0
    into.said = []
    count(generator, into)
    began, worked = time.perf_counter(), time.process_time()
    for wave in waves:
        for reply in await asyncio.gather(*(generator.generate(*one) for one in wave)):
            into.prompts += reply.usage.prompt_tokens
            into.said += [completion.text for completion in reply.completions]
    into.wall.append(time.perf_counter() - began)
    into.cpu.append(time.process_time() - worked)
    await generator.aclose()


def count(generator: TransformersGenerator, into: Timings) -> None:
    """Count the tokens that pass the decoder before the first token of an answer."""
    assert generator._loaded is not None
    model = generator._loaded.model
    forward = model.forward

    def counting(*args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] > 1 or inputs.get("mm_encoder_outputs"):
            into.tokens += inputs["input_ids"].numel()
        return forward(*args, **inputs)

    # `generate` asks for the names of its arguments.
    model.forward = functools.wraps(forward)(counting)


def larger(apprentice: Path, folder: Path) -> None:
    """Return the apprentice with another decoder."""
    hf: Any = transformers
    config = json.loads((apprentice / "config.json").read_text())
    config["text_config"] |= DECODER | HEADS | {"initializer_range": 0.05}
    torch.manual_seed(SEED)
    model = hf.FastVlmForConditionalGeneration(hf.FastVlmConfig(**config))
    decoder = sum(one.numel() for one in model.model.language_model.parameters())
    print(f"random decoder: {decoder / 1e6:.0f} M weights")
    model.save_pretrained(folder)
    hf.AutoProcessor.from_pretrained(apprentice).save_pretrained(folder)


if __name__ == "__main__":
    main()
