"""Overhead of evaluation over the model's own time: python benchmarks/running.py [--items 2000]

An endpoint in its own process answers after 100 ms. A run with --out, which stores all answers,
alternates with a bare loop that sends the same requests through the same generator at the same
concurrency. A run of many items then measures memory growth.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.outcomes import Method, ScoredAnswer
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.generation import OpenAIGenerator
from bottega.knowledge import KnowledgeBase, load_digits
from bottega.protocols import Generator
from bottega.recipes import Classifier
from bottega.types import Completion, Example, Prompt, Query, Reply, Sampling

CONCURRENCY, LATENCY = 64, 0.1
BAR = 1.05
SERVER = f"""
import asyncio
from aiohttp import web

async def answer(request):
    await request.read()
    await asyncio.sleep({LATENCY})
    said = {{"role": "assistant", "content": "7"}}
    choice = {{"index": 0, "message": said, "finish_reason": "stop"}}
    usage = {{"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}}
    return web.json_response({{"id": "x", "model": "m", "choices": [choice], "usage": usage}})

async def main():
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", type=int, default=50_000, help="items of the memory run")
    chosen = parser.parse_args()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        url = f"http://127.0.0.1:{one.stdout.readline().strip()}/v1"
        try:
            overhead(digits(chosen.items), url, chosen.repeats)
        finally:
            one.terminate()
    memory(chosen.many)


def overhead(data: Benchmark, url: str, repeats: int) -> None:
    times: dict[str, list[float]] = {"bare": [], "run": []}
    for _ in range(repeats):
        times["bare"].append(asyncio.run(timed(data, url, bare)))
        times["run"].append(asyncio.run(timed(data, url, run)))
    ratio = statistics.median(r / b for r, b in zip(times["run"], times["bare"], strict=True))
    ideal = len(data.items) / CONCURRENCY * LATENCY
    print(f"{len(data.items)} items, {CONCURRENCY} at once, {LATENCY * 1000:.0f} ms each")
    print(f"waiting alone     {ideal:8.2f} s")
    for name, seconds in times.items():
        print(f"{name:17} {statistics.median(seconds):8.2f} s")
    print(f"run / bare        {ratio:8.3f}   bar {BAR} {'met' if ratio <= BAR else 'MISSED'}")


async def timed(
    data: Benchmark, url: str, work: Callable[[Benchmark, Generator], Awaitable[None]]
) -> float:
    generator = OpenAIGenerator("m", base_url=url, api_key="none", concurrency=CONCURRENCY)
    started = time.perf_counter()
    try:
        await work(data, generator)
    finally:
        await generator.aclose()
    return time.perf_counter() - started


async def bare(data: Benchmark, generator: Generator) -> None:
    """Send the requests without evaluation."""
    settings = Classifier(generator, data.labels)
    prompt, waiting = settings.pipeline().prompt, iter(data.items)

    async def work() -> None:
        for item in waiting:
            query = replace(item.query, choices=data.labels)
            await generator.generate(prompt(query, []), settings.sampling)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


async def run(data: Benchmark, generator: Generator) -> None:
    """Evaluate like `bottega eval --methods zero-shot --out DIR`."""
    with tempfile.TemporaryDirectory() as folder, kept(folder, data) as journal:
        [method] = plan_zero_shot(data, generator)
        config = RunConfig(concurrency=CONCURRENCY)
        result, _ = await evaluate(data, method, config, RunState(journal))
        assert (result.n, result.failed) == (len(data.items), 0)


def kept(folder: str, data: Benchmark) -> closing[RunStore]:
    return closing(RunStore.open(Path(folder), {}, data.items))


def plan_zero_shot(data: Benchmark, generator: Generator) -> list[Method]:
    settings = Classifier(generator, data.labels)
    with KnowledgeBase.open(":memory:", embed=None) as nothing:
        return plan(RunConfig(methods=["zero-shot"], shots=[1]), data, nothing, settings)


def digits(count: int) -> Benchmark:
    """Return digits with a different question each, so no reply is cached."""
    examples = list(load_digits())
    queries = [
        replace(one, query=replace(one.query, text=f"{one.query.text} ({number})"))
        for number, one in zip(range(count), cycle(examples))
    ]
    return labelled_benchmark("digits", examples[:10], queries)


class ConstantGenerator:
    """Generator with one immediate reply and no memory."""

    name = "parrot"

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        await asyncio.sleep(0)
        return Reply(self.name, (Completion("a"),))

    async def aclose(self) -> None:
        pass


def memory(count: int) -> None:
    """Return the memory of the process during a run of immediate answers."""
    items = tuple(Example(Query(f"question {number}"), "a") for number in range(count))
    data = Benchmark("letters", items[:1], items, ("a", "b"))
    marks: list[tuple[int, int]] = []

    def done(scored: ScoredAnswer | None) -> None:
        if len(seen) % (count // 10) == 0:
            marks.append((len(seen), resident()))
        seen.append(None)

    seen: list[None] = []

    async def work() -> None:
        generator = ConstantGenerator()
        with tempfile.TemporaryDirectory() as folder, kept(folder, data) as journal:
            [method] = plan_zero_shot(data, generator)
            await evaluate(
                data, method, RunConfig(concurrency=CONCURRENCY), RunState(journal), done=done
            )

    asyncio.run(work())
    (first, before), (last, after) = marks[1], marks[-1]
    print(f"memory            {before / 1024:8.1f} MB after {first:,} items")
    print(f"                  {after / 1024:8.1f} MB after {last:,} items")


def resident() -> int:
    """Return resident memory in kilobytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4  # Linux


if __name__ == "__main__":
    main()
