"""The hashtag tree on a stream whose topics drift: python benchmarks/hashtag_tree.py [--seeds 6]

Scenes of the synthetic task `attributes` form a stream. Each has a question about one of five
attributes; the requested attributes drift over the stream, slowly or at once. A scene is first a
query with 8 retrieved examples, and then joins the cache with its answer. Groups are made from the
question vectors; within a group, examples are ordered as in the dense search (dual), or by image.
The cache alone determines the number of groups. Figures are means over the queries after the first
300, averaged over the seeds; intervals are 95 % t-intervals of the difference to dense dual
retrieval on the same stream, seed by seed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import stats

from bottega import Candidate, Example, Query, TokenEmbedder, TowerEmbedder
from bottega.protocols import Vectors
from bottega.retrieval import HashtagRetriever, HashtagTree, LeaveOneOutGroupCount
from bottega.tasks.attributes import ATTRIBUTES, AttributeTask
from bottega.types import ExampleChange

SHOTS, ENTRIES, COLD_START, FIXED = 8, 1500, 300, 10
AT_ONCE = 1_000
WIDTHS = {"slow": 0.7, "sudden": 0.0}  # of the window over the topics, in topics
METRICS = ("share", "among", "vote")


@dataclass(frozen=True)
class Views:
    """Unit rows of each entry: its image, its question, both, and its answer."""

    image: Vectors
    text: Vectors
    dual: Vectors
    answer: Vectors


class Cache:
    """Entries so far, as a retriever sees a knowledge base."""

    def __init__(self, stream: Sequence[Example], order: Vectors) -> None:
        self._stream = stream
        self._order = order
        self._row = {str(example.id): position for position, example in enumerate(stream)}
        self.size = 0

    def changes(self, since: int) -> list[ExampleChange]:
        return [ExampleChange(i + 1, str(self._stream[i].id)) for i in range(since, self.size)]

    def rows(self, ids: Sequence[str], vectors: Vectors) -> Vectors:
        return vectors[[self._row[id] for id in ids]]

    def search(self, query: Query, k: int, *, within: Collection[str]) -> list[Candidate]:
        positions = np.array([self._row[id] for id in within])
        scores = self._order[positions] @ self._order[self._row[str(query.id)]]
        best = np.argsort(-scores, kind="stable")[:k]
        return [Candidate(self._stream[positions[i]], float(scores[i])) for i in best]


class PrecomputedEmbedder:
    """Embedder that returns precomputed rows."""

    fingerprint = "precomputed"

    def __init__(self, stream: Sequence[Example], rows: Vectors) -> None:
        self._rows = {str(e.id): row for e, row in zip(stream, rows, strict=True)}
        self.dimension = rows.shape[1]

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return np.stack([self._rows[str(query.id)] for query in queries])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--entries", type=int, default=ENTRIES)
    arguments = parser.parse_args()
    for drift, width in WIDTHS.items():
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(arguments.seeds):
            stream = drifting(arguments.entries, width, seed)
            for name, figures in asyncio.run(compared(stream, seed)).items():
                rows.setdefault(name, []).append(figures)
            print(f"{drift} drift, seed {seed}: done", file=sys.stderr, flush=True)
        report(drift, rows)


def drifting(entries: int, width: float, seed: int) -> list[Example]:
    """Move a window over the topics from the first to the last while entries arrive."""
    scenes = generated_scenes(2 * entries, seed)
    waiting = {topic: [e for e in scenes if e.tags["topic"] == topic] for topic in ATTRIBUTES}
    rng = np.random.default_rng(seed)
    topics = np.arange(len(ATTRIBUTES))
    stream = []
    for i in range(entries):
        middle = i / entries * len(ATTRIBUTES) - 0.5
        near = np.exp(-0.5 * ((topics - middle) / width) ** 2) if width else topics == round(middle)
        topic = rng.choice(ATTRIBUTES, p=near / near.sum())
        stream.append(waiting[topic].pop())
    return stream


def generated_scenes(count: int, seed: int) -> list[Example]:
    """Generate more scenes than the task renders at once, with the same invented words."""
    invented = AttributeTask(examples=1, queries=1).generate(seed).labels
    scenes = []
    for part in range(-(-count // AT_ONCE)):
        task = AttributeTask(examples=AT_ONCE, queries=1, words="plain").generate(100 * seed + part)
        called = dict(zip(task.labels, invented, strict=True))
        for example in task.knowledge:
            query = replace(example.query, id=f"{part}-{example.id}")
            scenes.append(replace(example, query=query, answer=called[example.answer], id=query.id))
    return scenes[:count]


async def compared(stream: Sequence[Example], seed: int) -> dict[str, dict[str, float]]:
    views = embedded(stream)
    rows = {
        "dense image": await measured(stream, views, views.image, HashtagTree(1, adapt=False)),
        "dense text": await measured(stream, views, views.text, HashtagTree(1, adapt=False)),
        "dense dual": await measured(stream, views, views.dual, HashtagTree(1, adapt=False)),
    }
    for inside, order in (("dual", views.dual), ("image", views.image)):
        trees = {
            f"fixed {FIXED}": HashtagTree(FIXED, adapt=False, cold_start=COLD_START, seed=seed),
            f"fixed {FIXED}, re-fitted": HashtagTree(FIXED, cold_start=COLD_START, seed=seed),
            "adaptive": HashtagTree(counting(stream, views, order, seed), seed=seed),
            "adaptive, novel=2": HashtagTree(
                counting(stream, views, order, seed), novel=2.0, seed=seed
            ),
        }
        for name, tree in trees.items():
            rows[f"tree {name}, {inside} inside"] = await measured(stream, views, order, tree)
    return rows


def embedded(stream: Sequence[Example]) -> Views:
    tower, words = embedders()
    queries = [example.query for example in stream]
    image, text = tower.embed(queries), words.embed(queries)
    answer = words.embed([Query(example.answer) for example in stream])
    return Views(image, text, np.concatenate([image, text], axis=1) / np.sqrt(2), answer)


@cache
def embedders() -> tuple[TowerEmbedder, TokenEmbedder]:
    return TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled()


def counting(
    stream: Sequence[Example], views: Views, order: Vectors, seed: int
) -> LeaveOneOutGroupCount:
    entries = Cache(stream, order)
    return LeaveOneOutGroupCount(
        lambda ids: entries.rows(ids, order),
        lambda ids: entries.rows(ids, views.answer),
        k=SHOTS,
        seed=seed,
    )


async def measured(
    stream: Sequence[Example], views: Views, order: Vectors, tree: HashtagTree
) -> dict[str, float]:
    entries = Cache(stream, order)
    retrieve = HashtagRetriever(
        entries.changes,
        lambda ids: entries.rows(ids, views.text),
        PrecomputedEmbedder(stream, views.text),
        entries.search,
        tree,
    )
    scores: list[tuple[float, ...]] = []
    for position, example in enumerate(stream):
        if position:
            found = await retrieve(example.query, SHOTS)
            await retrieve.settled()  # for figures that do not depend on the machine's load
            if position >= COLD_START:
                scores.append(scored(example, found))
        entries.size = position + 1
    means = np.mean(scores, axis=0)
    return {
        **dict(zip(METRICS, map(float, means), strict=True)),
        "groups": float(len(tree.groups)),
        "re-fits": float(len(tree.refits)),
        "seconds": sum(refit.seconds for refit in tree.refits),
    }


def scored(example: Example, found: Sequence[Candidate]) -> tuple[float, ...]:
    """Return the share of neighbours with the right answer, whether one exists, and whether the
    vote is right.
    """
    votes = Counter(candidate.example.answer for candidate in found).most_common(2)
    right = dict(votes).get(example.answer, 0)
    share = sum(c.example.answer == example.answer for c in found) / len(found)
    alone = votes[0][0] == example.answer and (len(votes) == 1 or right > votes[1][1])
    return share, float(share > 0), float(alone)


def report(drift: str, rows: dict[str, list[dict[str, float]]]) -> None:
    columns = ("share", "difference", "among", "difference", "vote", "difference")
    print(f"\n{drift} drift, {len(next(iter(rows.values())))} seeds\n")
    print(f"| retrieval | {' | '.join(columns)} | groups | re-fits | s |")
    print("|---" * (len(columns) + 4) + "|")
    for name, figures in rows.items():
        cells = []
        for metric in METRICS:
            values = [one[metric] for one in figures]
            against = [one[metric] for one in rows["dense dual"]]
            cells += [f"{statistics.mean(values):.3f}", interval(values, against)]
        rest = [f"{statistics.mean(one[x] for one in figures):.1f}" for x in list(figures[0])[3:]]
        print(f"| {name} | {' | '.join(cells + rest)} |")


def interval(ours: Sequence[float], theirs: Sequence[float]) -> str:
    gains = np.subtract(ours, theirs)
    if not gains.any() or len(gains) < 2:
        return f"{gains.mean():+.3f}" if gains.any() else ""
    half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{gains.mean():+.3f} [{gains.mean() - half:+.3f}, {gains.mean() + half:+.3f}]"


if __name__ == "__main__":
    main()
