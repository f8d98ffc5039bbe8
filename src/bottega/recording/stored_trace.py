"""A search tree as a trace keeps it: without pixels, and each demonstration once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import orjson

from bottega._util.identity import image_hashes
from bottega.image import Image, path_text
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Message,
    Role,
    SearchNode,
    SearchTree,
    Trace,
    Usage,
)

Ended = Literal["rollouts", "agreement", "exhausted", "budget"]


@dataclass(frozen=True)
class StoredCandidate:
    """A demonstration that stands at one place of the tree or at many; images are sha256s."""

    id: str | None
    text: str
    images: tuple[str, ...]
    answer: str
    rationale: str | None
    score: float


@dataclass(frozen=True)
class StoredNode:
    """`types.SearchNode`, whose demonstration is a place among the tree's, None at the root."""

    demonstration: int | None
    value: float
    visits: int
    children: tuple[StoredNode, ...] = ()
    answer: Answer | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTree:
    """`types.SearchTree`; `demonstrations` stand in the order in which the tree first has them."""

    demonstrations: tuple[StoredCandidate, ...]
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
    places: dict[StoredCandidate, int] = {}
    root = _node(tree.root, places)
    return StoredTree(
        tuple(places), root, tree.path, tree.ended, tree.requests, tree.calls, tree.usage
    )


def read_tree(row: Mapping[str, Any]) -> StoredTree:
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


def _node(node: SearchNode, places: dict[StoredCandidate, int]) -> StoredNode:
    shown = None if node.candidate is None else _of(node.candidate)
    return StoredNode(
        None if shown is None else places.setdefault(shown, len(places)),
        float(node.value),
        int(node.visits),
        tuple(_node(child, places) for child in node.children),
        node.answer,
        {name: float(worth) for name, worth in node.rewards.items()},
    )


def _of(candidate: Candidate) -> StoredCandidate:
    example = candidate.example
    images = image_hashes(example.query)
    text, answer, rationale = example.query.text, example.answer, example.rationale
    return StoredCandidate(example.id, text, images, answer, rationale, float(candidate.score))


def _considered(row: Mapping[str, Any]) -> StoredCandidate:
    read = {"images": tuple(row["images"]), "score": _number(row["score"])}
    return StoredCandidate(**{**row, **read})


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


@dataclass(frozen=True)
class StoredPart:
    """A part of a message: its text, or the sha256 of its image."""

    text: str | None = None
    image: str | None = None


@dataclass(frozen=True)
class StoredMessage:
    role: Role
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class StoredDemonstration:
    """An example that was shown as number `order`, from 1. `id` is the knowledge base's, None if
    it came from elsewhere."""

    order: int
    id: str | None
    score: float
    text: str
    images: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class StoredTrace:
    """A trace without pixels: images are sha256s. Demonstrations stand in the order shown. `usage`
    is that of all that a search has asked, where there was one; `completions` are of the reply that
    became the answer."""

    id: str
    time: float
    question: str
    query_id: str | None
    choices: tuple[str, ...]
    images: tuple[str, ...]
    tier: str
    model: str
    demonstrations: tuple[StoredDemonstration, ...]
    messages: tuple[StoredMessage, ...]
    completions: tuple[Completion, ...]
    answer: Answer
    usage: Usage
    seconds: float
    model_seconds: float
    cost_usd: float | None
    tree: StoredTree | None = None


def stored_trace(trace: Trace) -> StoredTrace:
    query, reply, tree = trace.query, trace.reply, trace.tree
    return StoredTrace(
        trace.id,
        trace.time,
        query.text,
        query.id,
        query.choices,
        image_hashes(query),
        trace.tier,
        reply.model,
        tuple(_demonstration(i, one) for i, one in enumerate(trace.candidates, 1)),
        tuple(_message(message) for message in trace.prompt.messages),
        reply.completions,
        trace.answer,
        trace.usage,
        trace.seconds,
        reply.seconds,
        trace.cost_usd,
        None if tree is None else stored_tree(tree),
    )


def _demonstration(order: int, candidate: Candidate) -> StoredDemonstration:
    example = candidate.example
    images = image_hashes(example.query)
    return StoredDemonstration(
        order, example.id, float(candidate.score), example.query.text, images, example.answer
    )


def _message(message: Message) -> StoredMessage:
    return StoredMessage(
        message.role,
        tuple(
            StoredPart(image=part.sha256) if isinstance(part, Image) else StoredPart(text=part)
            for part in message.parts
        ),
    )


def to_json(trace: StoredTrace) -> str:
    return json_text(trace)


def json_text(value: Any) -> str:
    """JSON of a dataclass or of what JSON knows, in whole characters."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # half a character, as some replies and terminals give
        whole = path_text(json.dumps(value, default=asdict, ensure_ascii=False))
        return orjson.dumps(json.loads(whole)).decode()


def from_json(text: str) -> StoredTrace:
    row: dict[str, Any] = orjson.loads(text)
    row |= {
        "choices": tuple(row["choices"]),
        "images": tuple(row["images"]),
        "demonstrations": tuple(
            StoredDemonstration(**shown | {"images": tuple(shown["images"])})
            for shown in row["demonstrations"]
        ),
        "messages": tuple(
            StoredMessage(message["role"], tuple(StoredPart(**part) for part in message["parts"]))
            for message in row["messages"]
        ),
        "completions": tuple(Completion(**completion) for completion in row["completions"]),
        "answer": read_answer(row["answer"]),
        "usage": Usage(**row["usage"]),
    }
    if (tree := row.get("tree")) is not None:  # older traces have none
        row["tree"] = read_tree(tree)
    return StoredTrace(**row)
