"""Traces and search trees as stored: JSON without pixels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import orjson

from bottega._util.identity import image_hashes
from bottega.image import Image, path_text
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Compression,
    Ended,
    Role,
    SearchNode,
    SearchTree,
    Trace,
    Usage,
)


@dataclass(frozen=True)
class StoredCandidate:
    """Demonstration of one or more nodes of a tree; images are sha256s."""

    id: str | None
    text: str
    images: tuple[str, ...]
    answer: str
    rationale: str | None
    score: float


@dataclass(frozen=True)
class StoredNode:
    """`types.SearchNode` whose demonstration is an index into the tree's, None at the root."""

    demonstration: int | None
    value: float
    visits: int
    children: tuple[StoredNode, ...] = ()
    answer: Answer | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTree:
    """`types.SearchTree` with its `demonstrations` in the order of their first occurrence."""

    demonstrations: tuple[StoredCandidate, ...]
    root: StoredNode
    path: tuple[int, ...]
    ended: Ended
    requests: int
    calls: int
    usage: Usage

    @property
    def chosen(self) -> Iterator[StoredNode]:
        """Yield the nodes on the path, without the root."""
        node = self.root
        for index in self.path:
            node = node.children[index]
            yield node


def stored_tree(tree: SearchTree) -> StoredTree:
    """Return a search tree without pixels, with each demonstration once."""
    indices: dict[StoredCandidate, int] = {}
    root = _node(tree.root, indices)  # fills the indices
    return StoredTree(
        tuple(indices), root, tree.path, tree.ended, tree.requests, tree.calls, tree.usage
    )


def read_tree(row: Mapping[str, Any]) -> StoredTree:
    """Read a tree from JSON values. Raises `ValueError`, `TypeError` or `LookupError`."""
    shown = tuple(
        StoredCandidate(**{**one, "images": tuple(one["images"]), "score": _number(one["score"])})
        for one in row["demonstrations"]
    )
    read = {
        "demonstrations": shown,
        "root": _read_node(row["root"], len(shown)),
        "path": tuple(row["path"]),
        "usage": Usage(**row["usage"]),
    }
    tree = StoredTree(**{**row, **read})
    if tree.ended not in get_args(Ended) or any(index < 0 for index in tree.path):
        raise ValueError(f"the tree has an invalid end or path, got {tree.ended!r} and {tree.path}")
    list(tree.chosen)  # raises for an invalid path
    return tree


def _node(node: SearchNode, indices: dict[StoredCandidate, int]) -> StoredNode:
    index = None
    if node.candidate is not None:
        example, score = node.candidate.example, float(node.candidate.score)
        images = image_hashes(example.query)
        shown = StoredCandidate(
            example.id, example.query.text, images, example.answer, example.rationale, score
        )
        index = indices.setdefault(shown, len(indices))
    return StoredNode(
        index,
        float(node.value),
        int(node.visits),
        tuple(_node(child, indices) for child in node.children),
        node.answer,
        {name: float(reward) for name, reward in node.rewards.items()},
    )


def _read_node(row: Mapping[str, Any], shown: int) -> StoredNode:
    index, answer = row["demonstration"], row["answer"]
    if index is not None and not 0 <= index < shown:
        raise ValueError(f"demonstration index must be below {shown}, got {index}")
    read = {
        "value": _number(row["value"]),
        "children": tuple(_read_node(child, shown) for child in row["children"]),
        "answer": None if answer is None else read_answer(answer),
        "rewards": {name: _number(reward) for name, reward in dict(row["rewards"]).items()},
    }
    return StoredNode(**{**row, **read})


def read_answer(row: Mapping[str, Any]) -> Answer:
    """Read an answer from JSON values. Raises `TypeError` or `LookupError`."""
    return Answer(**{**row, "labels": tuple(row["labels"])})


def _number(value: Any) -> float:
    """Return the number; NaN is stored as null, because JSON has none."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class StoredPart:
    """Part of a message: a text or the sha256 of an image."""

    text: str | None = None
    image: str | None = None


@dataclass(frozen=True)
class StoredMessage:
    role: Role
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class StoredDemonstration:
    """Demonstration number `order`, from 1. `id` is the example's id in the knowledge base, None
    for an example of another source. `score` is its similarity to the query, `text` its question,
    `images` the sha256s of its images and `answer` its answer. `source` says where the example is
    from. `provenance` is its tag, such as `human`; `request` is the id of the gateway's request
    whose answer or correction it is."""

    order: int
    id: str | None
    score: float
    text: str
    images: tuple[str, ...]
    answer: str
    source: str = ""
    provenance: str = ""
    request: str = ""


@dataclass(frozen=True)
class StoredTrace:
    """Trace without pixels: `images` are sha256s, and `files` the names of those that were read
    from files.

    `id` and `time` (unix seconds) identify the trace. `question`, `query_id`, `choices` and
    `context` are parts of the query. `tier` and its `model` answered, for the `reason` that the
    router gives. `demonstrations` are in the order shown; `messages` are the prompt. `tree` is the
    search that chose them, `compression` describes passages read as a KV prefix. `completions`
    belong to the final reply, from which `answer` was parsed. `usage` and `cost_usd` include all
    requests of a search. `seconds` is the time of the whole answer, `model_seconds` the part of the
    model."""

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
    context: str = ""
    files: tuple[str, ...] = ()
    compression: Compression | None = None
    reason: str = ""


def stored_trace(trace: Trace) -> StoredTrace:
    """Return a trace without pixels."""
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
        tuple(
            StoredMessage(message.role, tuple(map(_stored_part, message.parts)))
            for message in trace.prompt.messages
        ),
        reply.completions,
        trace.answer,
        trace.usage,
        trace.seconds,
        reply.seconds,
        trace.cost_usd,
        None if tree is None else stored_tree(tree),
        query.context,
        tuple(image.source for image in query.images if image.source),
        trace.compression,
        trace.reason,
    )


def searchable_text(question: str, answer: str, files: Sequence[str]) -> str:
    """Return the text that `TraceStore.search` compares."""
    return path_text("\n".join((question, answer, *files))).casefold().replace("\0", "")


def _demonstration(order: int, candidate: Candidate) -> StoredDemonstration:
    example = candidate.example
    return StoredDemonstration(
        order,
        example.id,
        float(candidate.score),
        example.query.text,
        image_hashes(example.query),
        example.answer,
        example.source or "",
        example.tags.get("provenance", ""),
        example.tags.get("request", ""),
    )


def _stored_part(part: str | Image) -> StoredPart:
    return StoredPart(image=part.sha256) if isinstance(part, Image) else StoredPart(text=part)


def json_text(value: Any) -> str:
    """Return JSON of a dataclass or of JSON values. Lone surrogates become U+FFFD."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # a lone surrogate, as some replies and terminals produce
        whole = path_text(json.dumps(value, default=asdict, ensure_ascii=False))
        return orjson.dumps(json.loads(whole)).decode()


def from_json(text: str) -> StoredTrace:
    """Read a trace from the JSON of `json_text`. Raises `ValueError`, `TypeError` or
    `LookupError`."""
    row: dict[str, Any] = orjson.loads(text)
    row |= {
        "choices": tuple(row["choices"]),
        "images": tuple(row["images"]),
        "files": tuple(row["files"]),
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
    if (tree := row["tree"]) is not None:
        row["tree"] = read_tree(tree)
    if (compression := row["compression"]) is not None:
        row["compression"] = Compression(**compression)
    return StoredTrace(**row)
