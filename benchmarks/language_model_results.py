"""Pooled results of docs/experiments/language-models.md, and its Cache-of-Thought stream.

    python -m benchmarks.language_model_results pool runs/news-0 runs/news-1
    python -m benchmarks.language_model_results stream lm/news-0 --model openai-completions:NAME

`pool` joins runs of `bottega eval --out` over different items. `stream` sends the items of a task
one by one: the gold label replaces a perfect master, and the model sees the cached answers.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from bottega import InterleavedPrompter, KnowledgeBase, Query, Sampling, cache_of_thought
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods import votes
from bottega.evaluation.methods.retriever_factory import CachingEmbedder
from bottega.evaluation.metrics.intervals import (
    Estimate,
    accuracy,
    mcnemar,
    paired_difference,
)
from bottega.evaluation.outcomes import Method, Outcome, pipeline_method
from bottega.evaluation.report.runs import read_run
from bottega.evaluation.streams.growing_cache import StreamResult, stream
from bottega.knowledge.embedders.names import open_embedder
from bottega.naming import open_model
from bottega.protocols import Embedder, Generator, Tier
from bottega.routing import RandomRouter
from bottega.types import Answer, Completion, Prompt, Reply

REFERENCES = "knn@4,vote@4,nearest@1"
SAMPLING = Sampling(max_tokens=8, stop=("\n",))
SHOTS, THIRDS, TEST = 4, 3, 200
APPRENTICE = "apprentice"


def pool(folders: Sequence[Path], references: Sequence[str]) -> None:
    """Print each method over the items of all runs, and its paired differences to `references`."""
    scores: dict[str, dict[tuple[Path, int], bool]] = defaultdict(dict)
    invalid: dict[str, int] = defaultdict(int)
    for folder in folders:
        for (method, shots), answers in read_run(folder).answers.items():
            key = f"{method}@{shots}"
            for index, one in answers.items():
                scores[key][folder, index] = one.scored.score == 1
                invalid[key] += not one.scored.answer.valid
    for key, right in scores.items():
        figure = accuracy(list(right.values()))
        print(f"{key}: n = {len(right)}, {figure.value:.3f}", end=" ")
        print(f"[{figure.low:.3f}, {figure.high:.3f}], invalid {invalid[key]}")
    for key, right in scores.items():
        for other in references:
            shared = [item for item in right if item in scores.get(other, {})]
            if key == other or not shared:
                continue
            ours, theirs = [right[i] for i in shared], [scores[other][i] for i in shared]
            gain, p = paired_difference(ours, theirs), mcnemar(ours, theirs)
            print(f"{key} - {other}: {gain.value:+.3f}", end=" ")
            print(f"[{gain.low:+.3f}, {gain.high:+.3f}], p = {p:.3f}, n = {len(shared)}")


class GoldGenerator:
    """Master that is always right: it replies with the label of the question."""

    name = "gold"

    def __init__(self, data: Benchmark) -> None:
        self._labels = {item.query.text: item.answer for item in data.items}

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        [question] = prompt.messages[-1].parts
        return Reply(self.name, (Completion(self._labels[str(question)]),))

    async def aclose(self) -> None:
        """Nothing to close."""


async def run_stream(
    data: Benchmark, model: Generator, embedder: Embedder, master_rate: float, seed: int
) -> tuple[StreamResult, StreamResult]:
    """Return the stream with the model, and with `knn` over the same cache in its place."""
    tiers = (Tier(APPRENTICE, model, SHOTS), Tier("master", GoldGenerator(data)))
    router = partial(RandomRouter, master_rate=master_rate, seed=seed)  # the same choices in both
    with closing(KnowledgeBase.open(":memory:", embedder)) as cache:
        answers = cache_of_thought(
            cache,
            tiers=tiers,
            route=router,
            prompt=InterleavedPrompter(show_choices=False),
            labels=data.labels,
            reasoning=False,
            sampling=SAMPLING,
        )
        ours = await stream(data, pipeline_method("cached", answers, SHOTS))
    with closing(KnowledgeBase.open(":memory:", embedder)) as cache:
        theirs = await stream(data, _knn(data, cache, router(tiers)))
    return ours, theirs


def _knn(data: Benchmark, cache: KnowledgeBase, route: RandomRouter) -> Method:
    items = {item.query.text: item for item in data.items}

    async def answer(query: Query) -> Outcome:
        if (await route(query)).name != APPRENTICE:
            cache.add([items[query.text]])
            label = items[query.text].answer
            return Outcome(Answer(label, labels=(label,)))
        return Outcome(votes.knn(cache.search(query, SHOTS) if len(cache) else []))

    return Method("knn", SHOTS, answer)


async def streams(args: argparse.Namespace) -> None:
    """Print the accuracy of the model and of `knn` for each third of the streams."""
    model = open_model(args.model)
    embedder = CachingEmbedder(open_embedder("minilm"))
    pairs: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for seed, folder in enumerate(args.tasks):
        data = load_benchmark(f"jsonl:{folder}", seed=seed, limit=args.limit)
        ours, theirs = await run_stream(data, model, embedder, args.master_rate, seed)
        other = theirs.scores()
        for part in range(THIRDS):
            for index, score in ours.scores(APPRENTICE, part).items():
                pairs[part].append((score == 1, other[index] == 1))
    await model.aclose()
    pairs[THIRDS] = [pair for part in range(THIRDS) for pair in pairs[part]]
    for part, scored in pairs.items():
        mine, knn = ([pair[side] for pair in scored] for side in (0, 1))
        figure, gain = accuracy(mine), paired_difference(mine, knn)
        title = "all" if part == THIRDS else f"third {part + 1}"
        print(
            f"{title}: n = {len(mine)}, model {_shown(figure)}, knn {_shown(accuracy(knn))},",
            end=" ",
        )
        print(f"difference {_shown(gain)}, p = {mcnemar(mine, knn):.3f}")


def _shown(figure: Estimate) -> str:
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pooled = commands.add_parser("pool", help="Join runs over different items.")
    pooled.add_argument("runs", type=Path, nargs="+")
    pooled.add_argument("--against", default=REFERENCES, help="methods at shots, comma-separated")
    cached = commands.add_parser("stream", help="Run streams whose cache starts empty.")
    cached.add_argument("tasks", type=Path, nargs="+", help="one folder for each seed")
    cached.add_argument("--model", required=True)
    cached.add_argument("--limit", type=int, default=TEST)
    cached.add_argument("--master-rate", type=float, default=0.3)
    args = parser.parse_args()
    if args.command == "stream":
        asyncio.run(streams(args))
    else:
        pool(args.runs, args.against.split(","))


if __name__ == "__main__":
    main()
