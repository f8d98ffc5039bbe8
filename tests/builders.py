"""Builders of images, examples and search trees for tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import numpy as np
from PIL import Image as Pillow

from bottega.image import Image
from bottega.protocols import Vectors
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Example,
    Prompt,
    Query,
    Reply,
    SearchNode,
    SearchTree,
    Trace,
    Usage,
)

QUESTION = "What is in the image above?"


def solid_image(shade: int, size: tuple[int, int] = (8, 8)) -> Image:
    """Return an image of one colour; different shades give different images."""
    return replace(_encoded(shade, size))  # a copy, because an image keeps its decoded pixels


@cache
def _encoded(shade: int, size: tuple[int, int]) -> Image:
    return Image.from_pillow(Pillow.new("RGB", size, (shade % 256, shade // 256, 90)))


def example(label: str, shade: int, id: str | None = None) -> Example:
    return Example(Query(QUESTION, (solid_image(shade),)), label, id=id or f"{label}-{shade}")


def candidates(*labels: str) -> list[Candidate]:
    """Return candidates with these labels, in descending order of score."""
    return [Candidate(example(label, i), 1.0 - i / 10) for i, label in enumerate(labels)]


def search_tree(
    examples: Sequence[Candidate], *, depth: int = 3, children: int = 3, seed: int = 0
) -> SearchTree:
    """Return a random tree of full depth. A path repeats no example; N are sums and Q are means.
    Leaves answer with the label of their last demonstration."""
    root = _random_node(None, examples, depth, children, random.Random(seed))
    _, path = _best(root)
    requests = 3 * root.visits
    return SearchTree(
        root, path, "rollouts", requests, 2 * requests, Usage(900 * requests, 8 * requests, 500)
    )


def _random_node(
    candidate: Candidate | None,
    left: Sequence[Candidate],
    depth: int,
    children: int,
    rng: random.Random,
) -> SearchNode:
    if candidate is not None and not (depth and left):
        label = candidate.example.answer
        answer = Answer(label, labels=(label,), rationale=f"it looks like {label}")
        rewards = {"self": rng.randrange(6) / 5, "mutual": rng.randrange(6) / 5}
        value = 0.2 * rewards["self"] + 0.8 * rewards["mutual"]
        return SearchNode(candidate, value, 1, (), answer, rewards)
    nodes = tuple(
        _random_node(
            child, [other for other in left if other is not child], depth - 1, children, rng
        )
        for child in rng.sample(left, min(children, len(left)))
    )
    at_root = None if candidate is not None else Answer("unknown", valid=False)
    value, visits = mean(node.value for node in nodes), sum(node.visits for node in nodes)
    return SearchNode(candidate, value, visits, nodes, at_root)


def _best(node: SearchNode) -> tuple[float, tuple[int, ...]]:
    """Return the largest sum of Q on a path to a leaf, and that path."""
    paths = [(*_best(child), i) for i, child in enumerate(node.children)]
    most, path, index = max(paths, default=(0.0, (), None))
    return node.value + most, path if index is None else (index, *path)


def searched(tree: SearchTree, query: Query, *, id: str = "abc123") -> Trace:
    """Return the trace of a pipeline whose search built this tree."""
    node, shown = tree.root, list[Candidate]()
    for index in tree.path:
        node = node.children[index]
        shown += [node.candidate] if node.candidate else []
    answer = node.answer or Answer("", valid=False)
    reply = Reply("m", (Completion(f"Answer: {answer.text}"),), Usage(900, 8), 0.2)
    return Trace(id, 1.0, query, "m", tuple(shown), Prompt(()), reply, answer, 2.5, 0.01, tree=tree)


class ListPool:
    """Knowledge base of a list of examples, for the random retrievers."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = {str(e.id): e for e in examples}

    def ids(self) -> Sequence[str]:
        return list(self.examples)

    def ids_by_label(self) -> Mapping[str, Sequence[str]]:
        labels: dict[str, list[str]] = {}
        for id, e in self.examples.items():
            for label in (e.answer,) if e.labels is None else e.labels:
                labels.setdefault(label, []).append(id)
        return labels

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return [self.examples[id] for id in ids]


@dataclass(frozen=True)
class EarlierPhotos:
    """Embedder with the fingerprint of earlier versions."""

    fingerprint: str
    dimension: int = 256

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return np.random.default_rng(0).normal(size=(len(queries), 256)).astype(np.float32)
