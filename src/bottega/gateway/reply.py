"""Replies to clients: headers, and complete replies as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from bottega.gateway.endpoint import Reply, RequestRecord
from bottega.gateway.response_cache.memory import CachedReply, RepeatedRequest
from bottega.openai_api.streams import DONE_EVENT, to_chunks, to_event

MAX_NAME = 200


def replayed(record: RequestRecord, repeated: RepeatedRequest, reply: CachedReply) -> Reply:
    record.state, record.namespace = "replayed", repeated.namespace
    record.route, record.model = reply.route, reply.model
    headers = headers_of(record)
    if repeated.stream:
        return Reply(headers, events=as_stream(reply.payload, repeated.include_usage))
    return Reply(headers, reply.payload)


async def as_stream(payload: bytes, include_usage: bool) -> AsyncGenerator[bytes]:
    for step in to_chunks(payload, include_usage=include_usage):
        yield to_event(step)
    yield DONE_EVENT


def headers_of(record: RequestRecord) -> dict[str, str]:
    """Return the `x-bottega-*` headers that are known when the reply begins."""
    cache = "augmented" if record.shots else "none"
    cache = {"replayed": "replayed", "passed_through": "passed"}.get(record.state, cache)
    headers = {
        "x-bottega-route": record.route,
        "x-bottega-model": _printable(record.model),
        "x-bottega-cache": cache,
        "x-bottega-demonstrations": str(record.shots),
    }
    if record.fallback:
        headers["x-bottega-fallback"] = record.fallback
    if record.state == "passed_through":
        headers["x-bottega-passed"] = record.reason
    if record.similarity is not None:
        headers["x-bottega-similarity"] = f"{record.similarity:.4f}"
    if record.usage.prompt_tokens or record.state == "replayed":
        headers["x-bottega-prompt-tokens"] = str(record.usage.prompt_tokens)
        headers["x-bottega-completion-tokens"] = str(record.usage.completion_tokens)
        if record.cost_usd is not None:
            headers["x-bottega-cost-usd"] = f"{record.cost_usd:.8f}"
    if record.stored is not None:
        headers["x-bottega-stored"] = record.stored
    return headers


def _printable(model: str) -> str:
    """Return a model's name, which the upstream chooses, fit for a header."""
    if model.isprintable() and len(model) <= MAX_NAME:
        return model
    return "".join(c if c.isprintable() else "?" for c in model[:MAX_NAME])
