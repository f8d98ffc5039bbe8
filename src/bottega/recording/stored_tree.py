"""A search tree as a trace keeps it: without pixels, and each demonstration once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bottega.types import Answer, Candidate, Node, SearchTree, Usage

Ended = Literal["rollouts", "agreement", "exhausted", "budget"]


@dataclass(frozen=True)
class Considered:
    """A demonstration that stands at one place of the tree or at many; images are sha256s."""

    id: str | None
    text: str
    images: tuple[str, ...]
    answer: str
    rationale: str | None
    score: float


@dataclass(frozen=True)
class StoredNode:
    """`types.Node`, whose demonstration is a place among the tree's, None at the root."""

    demonstration: int | None
    value: float
    visits: int
    children: tuple[StoredNode, ...] = ()
    answer: Answer | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTree:
    """`types.SearchTree`; `demonstrations` stand in the order in which the tree first has them."""

    demonstrations: tuple[Considered, ...]
    root: StoredNode
    path: tuple[int, ...]
    ended: Ended
    requests: int
    calls: int
    usage: Usage

    @property
    def chosen(self) -> Iterator[StoredNode]:
        """The nodes on the path, the root not among them."""
        node = self.root
        for place in self.path:
            node = node.children[place]
            yield node


def stored_tree(tree: SearchTree) -> StoredTree:
    places: dict[Considered, int] = {}
    root = _node(tree.root, places)
    return StoredTree(
        tuple(places), root, tree.path, tree.ended, tree.requests, tree.calls, tree.usage
    )


def tree_from(row: Mapping[str, Any]) -> StoredTree:
    """Raises `ValueError`, `TypeError` or `LookupError` for what was never a tree."""
    shown = tuple(_considered(one) for one in row["demonstrations"])
    read = {
        "demonstrations": shown,
        "root": _read_node(row["root"], len(shown)),
        "path": tuple(row["path"]),
        "usage": Usage(**row["usage"]),
    }
    tree = StoredTree(**{**row, **read})
    if tree.ended not in get_args(Ended) or any(place < 0 for place in tree.path):
        raise ValueError(f"no search ends by {tree.ended!r} at {tree.path}")
    list(tree.chosen)  # a path that leads nowhere
    return tree


def _node(node: Node, places: dict[Considered, int]) -> StoredNode:
    shown = None if node.candidate is None else _of(node.candidate)
    return StoredNode(
        None if shown is None else places.setdefault(shown, len(places)),
        float(node.value),
        int(node.visits),
        tuple(_node(child, places) for child in node.children),
        node.answer,
        {name: float(worth) for name, worth in node.rewards.items()},
    )


def _of(candidate: Candidate) -> Considered:
    example = candidate.example
    images = tuple(image.sha256 for image in example.query.images)
    text, answer, rationale = example.query.text, example.answer, example.rationale
    return Considered(example.id, text, images, answer, rationale, float(candidate.score))


def _considered(row: Mapping[str, Any]) -> Considered:
    read = {"images": tuple(row["images"]), "score": _number(row["score"])}
    return Considered(**{**row, **read})


def _read_node(row: Mapping[str, Any], shown: int) -> StoredNode:
    place, answer = row["demonstration"], row["answer"]
    if place is not None and not 0 <= place < shown:
        raise ValueError(f"a node shows demonstration {place} of {shown}")
    read = {
        "value": _number(row["value"]),
        "children": tuple(_read_node(child, shown) for child in row["children"]),
        "answer": None if answer is None else read_answer(answer),
        "rewards": {name: _number(worth) for name, worth in dict(row["rewards"]).items()},
    }
    return StoredNode(**{**row, **read})


def read_answer(row: Mapping[str, Any]) -> Answer:
    return Answer(**{**row, "labels": tuple(row["labels"])})


def _number(value: Any) -> float:
    """JSON has no NaN: it is written as null."""
    return math.nan if value is None else float(value)
