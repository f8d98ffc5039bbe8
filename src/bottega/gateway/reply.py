"""How a reply goes out: what its headers tell, and a whole reply as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from bottega.gateway.endpoint import Reply, RequestRecord
from bottega.gateway.response_cache.memory import CachedReply, RepeatedRequest
from bottega.openai_api.chunks import to_chunks
from bottega.openai_api.sse import DONE_EVENT, to_event

LONGEST_NAME = 200


def replayed(record: RequestRecord, before: RepeatedRequest, reply: CachedReply) -> Reply:
    record.state, record.namespace = "replayed", before.namespace
    record.route, record.model = reply.route, reply.model
    headers = headers_of(record)
    if before.stream:
        return Reply(headers, events=again(reply.payload, before.include_usage))
    return Reply(headers, reply.payload)


async def again(payload: bytes, include_usage: bool) -> AsyncGenerator[bytes]:
    for step in to_chunks(payload, include_usage=include_usage):
        yield to_event(step)
    yield DONE_EVENT


def headers_of(record: RequestRecord) -> dict[str, str]:
    """Of what was done, as far as it is known when the reply begins."""
    cache: str = record.state
    if cache not in ("replayed", "passed"):
        cache = "augmented" if record.shots else "none"
    headers = {
        "x-bottega-route": record.route,
        "x-bottega-model": _plain(record.model),
        "x-bottega-cache": cache,
        "x-bottega-demonstrations": str(record.shots),
    }
    if record.fallback:
        headers["x-bottega-fallback"] = record.fallback
    if record.state == "passed":
        headers["x-bottega-passed"] = record.why
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


def _plain(model: str) -> str:
    """A model says itself what it is called."""
    if model.isprintable() and len(model) <= LONGEST_NAME:
        return model
    return "".join(c if c.isprintable() else "?" for c in model[:LONGEST_NAME])
