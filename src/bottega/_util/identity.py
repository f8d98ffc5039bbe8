"""Identity of queries, examples and requests: keys, random states and exclusion rules."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import orjson

from bottega.types import Example, Prompt, Query, Sampling

# 64 bits: a collision among a million examples occurs once in 40 million knowledge bases.
ID_LENGTH = 16
# Tag with the conversation before the question, or a digest of it; part of the identity.
CONTEXT = "context"


def json_digest(value: object, *, sort_keys: bool = False) -> str:
    """Return the sha256 of a value's JSON. Raises `TypeError` for a value that JSON cannot hold."""
    option = orjson.OPT_SORT_KEYS if sort_keys else 0
    return hashlib.sha256(orjson.dumps(value, option=option)).hexdigest()


def image_hashes(query: Query) -> tuple[str, ...]:
    """Return the sha256 of each image in order."""
    return tuple(image.sha256 for image in query.images)


def query_key(query: Query) -> tuple[str, ...]:
    """Return the text and the image hashes."""
    return query.text, *image_hashes(query)


def query_rng(query: Query, seed: object) -> random.Random:
    """Return a generator seeded by the query's content, so results do not depend on query order."""
    # Published runs depend on this text, with its last colon also for a query without images.
    return random.Random(f"{seed}:{query.text}:{':'.join(image_hashes(query))}")


# "same-image" excludes every example that shares an image with the query. Evaluations need it:
# another question about the same image may give the answer away. "same-question" excludes only the
# identical question, so a cache can show earlier answers about the same image.
Exclude = Literal["same-image", "same-question"]
DESCRIPTIONS: Mapping[Exclude, str] = {
    "same-image": "every example that shares an image with the query",
    "same-question": "the same question only",
}


def is_excluded(query: Query, example: Example, exclude: Exclude = "same-image") -> bool:
    """Return whether the rule excludes the example; the query's own id is always excluded."""
    if query.id is not None and query.id == example.id:
        return True
    if exclude == "same-question":
        return is_same_question(query, example)
    return not set(query.images).isdisjoint(example.query.images)


def is_same_question(query: Query, example: Example) -> bool:
    """Compare images, text, choices and context. An example without choices matches any choices;
    one without a context (`tags["context"]`) matches any context."""
    other = example.query
    return (
        query.text == other.text
        and query.images == other.images
        and other.choices in ((), query.choices)
        and example.tags.get(CONTEXT, query.context) == query.context
    )


def identity(example: Example) -> str:
    """Return the id of an example: equal for the same image bytes, context, question, choices and
    answer."""
    return json_digest([*_question(example), example.answer])[:ID_LENGTH]


def question_digest(example: Example) -> str:
    """Return a digest that is equal for the same image bytes, context, question and choices."""
    return json_digest(_question(example))


def query_digests(query: Query) -> set[str]:
    """Return the digests of all examples with the same question. An example without a context, or
    without choices, matches any."""
    hashes = image_hashes(query)
    return {
        json_digest(question_parts(hashes, query.text, context, choices))
        for context in (None, query.context)
        for choices in ((), query.choices)
    }


def question_parts(
    hashes: Sequence[str], text: str, context: str | None, choices: Sequence[str]
) -> list[object]:
    """Return the parts that identify a question. The context is in a list and the choices are in an
    object, so they cannot be confused."""
    parts: list[object] = [hashes, text]
    if context is not None:
        parts.append([context])
    if choices:
        parts.append({"choices": choices})
    return parts


def _question(example: Example) -> list[object]:
    query = example.query
    context = example.tags.get(CONTEXT)
    return question_parts(image_hashes(query), query.text, context, query.choices)


def request_key(fingerprint: str, prompt: Prompt, sampling: Sampling) -> str:
    """Return the sha256 of everything that affects the output; images count by their sha256."""
    request = {
        "model": fingerprint,
        "messages": [
            [
                message.role,
                [
                    ["text", part] if isinstance(part, str) else ["image", part.sha256]
                    for part in message.parts
                ],
            ]
            for message in prompt.messages
        ],
        "sampling": asdict(sampling),
    }
    return json_digest(request, sort_keys=True)
