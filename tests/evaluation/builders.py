"""Small benchmarks with episodes."""

from __future__ import annotations

from bottega.evaluation.benchmark import Benchmark
from bottega.types import Example, Query
from tests.builders import solid_image

QUESTION = "Which one?"


def episodic_benchmark(episodes: int = 3, classes: int = 2, shots: int = 2) -> Benchmark:
    """Return episodes with `shots` images of similar shade per class and one query per class."""
    knowledge: list[Example] = []
    items: list[Example] = []
    for e in range(episodes):
        for c in range(classes):
            for shot in range(shots + 1):
                shade = 2000 * e + 600 * c + shot
                id, label = f"{e}-{c}-{shot}", f"{'ab'[c]}{e}"
                query = Query(QUESTION, (solid_image(shade),), id=id)
                one = Example(query, label, tags={"episode": str(e)}, id=id)
                (items if shot == shots else knowledge).append(one)
    labels = tuple(dict.fromkeys(item.answer for item in items))
    episode_of = {str(one.id): one.tags["episode"] for one in (*knowledge, *items)}
    return Benchmark("shades", tuple(knowledge), tuple(items), labels, episode_of=episode_of)


def passage_benchmark(episodes: int = 2, count: int = 6) -> Benchmark:
    """Return passages that each state one home, with one item per passage."""
    knowledge, items = [], []
    for e in range(episodes):
        for i in range(count):
            tags = {"episode": str(e)}
            passage = Query(f"The home of n{i} is h{e}{i}", id=f"p-{e}-{i}")
            knowledge.append(Example(passage, "", tags=tags, id=passage.id))
            query = Query("What is its home?", (solid_image(50 * e + i),), id=f"q-{e}-{i}")
            item_tags = {**tags, "passage": str(passage.id), "topic": f"home {i}"}
            items.append(Example(query, f"h{e}{i}", tags=item_tags, id=query.id))
    episode_of = {str(one.id): one.tags["episode"] for one in (*knowledge, *items)}
    return Benchmark("homes", tuple(knowledge), tuple(items), (), episode_of=episode_of)
