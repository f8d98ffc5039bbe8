"""A trace as it is read back, and how it goes to JSON and comes from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from bottega.image import Image, path_text
from bottega.recording.stored_tree import StoredTree, read_answer, stored_tree, tree_from
from bottega.types import Answer, Candidate, Completion, Message, Role, Trace, Usage


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
class Demonstration:
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
    demonstrations: tuple[Demonstration, ...]
    messages: tuple[StoredMessage, ...]
    completions: tuple[Completion, ...]
    answer: Answer
    usage: Usage
    seconds: float
    model_seconds: float
    cost_usd: float | None
    tree: StoredTree | None = None


def stored(trace: Trace) -> StoredTrace:
    query, reply, tree = trace.query, trace.reply, trace.tree
    return StoredTrace(
        trace.id,
        trace.time,
        query.text,
        query.id,
        query.choices,
        tuple(image.sha256 for image in query.images),
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


def _demonstration(order: int, candidate: Candidate) -> Demonstration:
    example = candidate.example
    images = tuple(image.sha256 for image in example.query.images)
    return Demonstration(
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
            Demonstration(**shown | {"images": tuple(shown["images"])})
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
        row["tree"] = tree_from(tree)
    return StoredTrace(**row)
