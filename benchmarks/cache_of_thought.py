"""Cache-of-Thought experiments with the bundled models: python -m benchmarks.cache_of_thought

The data are handwritten digits of the half that the master never saw, and synthetic scenes with
questions about one of five attributes. The output is Table 1 (retrieval variants), tables 2 and 3
(shots, halves of the cache), figure 5 (accuracy against the apprentice's share, by start), figure 6
(the apprentice's gain by start), figure 7 (by third of the stream) and APGR, each with its
baselines. No model sees a gold answer: caches hold the master's answers, right or wrong. --replies
stores replies by prompt content; a second run sends no requests.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.cache_figures import draw, tables
from benchmarks.cache_streams import (
    EmptyRetriever,
    ModelPool,
    RandomRetriever,
    Retrieving,
    Setting,
    coin_router,
    coverage_router,
    half_first,
    pipeline,
    run_stream,
    run_votes,
    table_one,
    with_master_answers,
)
from bottega import Example, KnowledgeBase
from bottega.evaluation import votes
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method, Outcome, pipeline_method
from bottega.evaluation.runner import evaluate
from bottega.evaluation.streams import StreamResult
from bottega.pipeline import FixedRouter
from bottega.protocols import Retriever
from bottega.types import Query

DIGITS = Setting("digits:half=second", 1, "image", tuple(range(10, 100, 10)), seeds=(0, 1, 2, 3, 4))
SCENES = Setting(
    "attributes:words=plain", 4, "dual", (10, 30, 50, 70, 90), seeds=(0, 1, 2), items=200
)
STREAMS_AT_ONCE, AT_ONCE = 64, 64
# Baselines run only at these shares of the apprentice.
FEW = (10, 50, 80, 90)
# Size of MMMU's development set (the paper's cold start) relative to its validation set.
COLD = 0.17
SHOTS = (1, 2, 4, 8)
Key = tuple[str, int]  # a start or a baseline, and the apprentice's share in per cent


@dataclass
class SettingResults:
    """Results of one setting: streams by start and share, and answers with a fixed cache by row, in
    the order of the seeds.
    """

    setting: Setting
    streams: dict[Key, list[StreamResult]]
    fixed: dict[str, list[StreamResult]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, three shares, 150 items")
    parser.add_argument("--seeds", help="other seeds than the reported ones, e.g. 100,101")
    parser.add_argument("--only", choices=("digits", "attributes"))
    parser.add_argument("--replies", type=Path, default=Path("build/cache-of-thought"))
    parser.add_argument("--out", type=Path, default=Path("build/cache-of-thought"))
    chosen = parser.parse_args()
    for folder in (chosen.replies, chosen.out):
        folder.mkdir(parents=True, exist_ok=True)
    for setting in (DIGITS, SCENES):
        name = setting.spec.partition(":")[0]
        if chosen.only not in (None, name):
            continue
        if chosen.quick:
            setting = replace(setting, rates=(70, 80, 90), seeds=(0, 1), items=150)
        if chosen.seeds:
            setting = replace(setting, seeds=tuple(map(int, chosen.seeds.split(","))))
        start = time.perf_counter()
        measured = asyncio.run(measure(setting, chosen.replies))
        (chosen.out / f"cache_of_thought_{name}.md").write_text(tables(measured), "utf-8")
        draw(measured, chosen.out / f"cache_of_thought_{name}.png")
        print(tables(measured))
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


async def measure(setting: Setting, replies: Path) -> SettingResults:
    """Run all streams of all seeds concurrently; the models batch their requests."""
    models = ModelPool(replies)
    free = asyncio.Semaphore(STREAMS_AT_ONCE)

    async def one(seed: int) -> SettingResults:
        data = setting.load(seed)
        corpus = await with_master_answers(models, data.knowledge, data.labels)
        fixed_results = await fixed(models, setting, data, corpus, seed)
        streams = await dynamic(models, setting, data, corpus, seed, free)
        print(f"{setting.spec}, seed {seed}: done", flush=True)
        return SettingResults(setting, streams, fixed_results)

    try:
        return joined(await asyncio.gather(*map(one, setting.seeds)))
    finally:
        await models.apprentice.aclose()
        await models.master.aclose()


def joined(single: Sequence[SettingResults]) -> SettingResults:
    first = single[0]
    streams = {key: [one.streams[key][0] for one in single] for key in first.streams}
    answers = {key: [one.fixed[key][0] for one in single] for key in first.fixed}
    return SettingResults(first.setting, streams, answers)


async def dynamic(
    models: ModelPool,
    setting: Setting,
    data: Benchmark,
    corpus: Sequence[Example],
    seed: int,
    free: asyncio.Semaphore,
) -> dict[Key, list[StreamResult]]:
    """Run each start at each share, and the baselines at some shares."""
    cold = corpus[: round(COLD * len(data.items))]
    run = partial(run_stream, models, setting, data)
    vote = partial(run_votes, models, setting, data)
    random: Retrieving = lambda cache: RandomRetriever(cache, seed)  # noqa: E731
    jobs: dict[Key, Callable[[], Awaitable[StreamResult]]] = {}
    for rate in setting.rates:
        coin = coin_router(rate, seed)
        jobs |= {
            ("NoStart", rate): partial(run, coin),
            ("ColdStart", rate): partial(run, coin, cold),
            ("WarmStart", rate): partial(run, coin, corpus),
            ("Hierarchical", rate): partial(run, coin, corpus, models.hashtags),
            ("half first", rate): partial(run, half_first(rate, seed, len(data.items))),
            ("coverage", rate): partial(run, coverage_router(setting, rate, seed)),
        }
        if rate not in FEW:
            continue
        jobs |= {
            ("no cache", rate): partial(run, coin, (), lambda cache: EmptyRetriever()),
            ("random, NoStart", rate): partial(run, coin, (), random),
            ("vote, NoStart", rate): partial(vote, coin),
            ("random, WarmStart", rate): partial(run, coin, corpus, random),
            ("vote, WarmStart", rate): partial(vote, coin, corpus),
        }

    async def one(job: Callable[[], Awaitable[StreamResult]]) -> list[StreamResult]:
        async with free:
            return [await job()]

    done = await asyncio.gather(*map(one, jobs.values()))
    return dict(zip(jobs, done, strict=True))


async def fixed(
    models: ModelPool,
    setting: Setting,
    data: Benchmark,
    corpus: Sequence[Example],
    seed: int,
) -> dict[str, list[StreamResult]]:
    """Run tables 1 to 3: the apprentice alone, with a fixed cache."""
    found: dict[str, list[StreamResult]] = {}
    half = corpus[: len(corpus) // 2]
    rows = table_one(models, corpus)
    random: Retrieving = lambda cache: RandomRetriever(cache, seed)  # noqa: E731
    found["master"] = [await _alone(models, data, 1)]
    found["zero-shot"] = [await _alone(models, data, 0)]
    for size, examples in (("full", corpus), ("half", half)):
        with models.open(examples, tuple(models.views())) as cache:
            for name, retrieving in (*rows.items(), ("random", random)):
                method = _shown(models, data, cache, retrieving, setting.shots)
                found[f"{name}, {size}"] = [await _evaluated(data, method)]
            for shots in SHOTS:
                method = _shown(models, data, cache, setting.dense, shots)
                found[f"{shots} shots, {size}"] = [await _evaluated(data, method)]
                vote = _voting(setting.dense(cache), shots)
                found[f"vote of {shots}, {size}"] = [await _evaluated(data, vote)]
    return found


def _voting(retrieve: Retriever, shots: int) -> Method:
    async def vote(query: Query) -> Outcome:
        return Outcome(votes.vote(await retrieve(query, shots)))

    return Method("vote", shots, vote)


async def _alone(models: ModelPool, data: Benchmark, position: int) -> StreamResult:
    with models.open() as cache:
        by_name = pipeline(
            models, cache, lambda tiers: FixedRouter(tiers[position]), labels=data.labels
        )
        return await _evaluated(data, pipeline_method("alone", replace(by_name, record=None)))


def _shown(
    models: ModelPool, data: Benchmark, cache: KnowledgeBase, retrieving: Retrieving, shots: int
) -> Method:
    """Answer without storing any answer."""
    answers = pipeline(
        models,
        cache,
        lambda tiers: FixedRouter(tiers[0]),
        retrieve=retrieving(cache),
        shots=shots,
        labels=data.labels,
    )
    return pipeline_method("fixed", replace(answers, record=None), shots)


async def _evaluated(data: Benchmark, method: Method) -> StreamResult:
    _, scored = await evaluate(data, method, RunConfig(concurrency=AT_ONCE))
    return StreamResult(tuple(scored), len(data.items))


if __name__ == "__main__":
    main()
