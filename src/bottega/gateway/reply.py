"""How a reply goes out: what its headers tell, and a whole reply as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson

from bottega.gateway.endpoint import Progress, Reply
from bottega.gateway.response_cache.memory import Asked, Remembered
from bottega.gateway.response_cache.replay import events
from bottega.gateway.upstreams.sse import LAST, event

LONGEST_NAME = 200


def replayed(progress: Progress, before: Asked, reply: Remembered) -> Reply:
    progress.state, progress.namespace = "replayed", before.namespace
    progress.route, progress.model = reply.route, reply.model
    headers = headers_of(progress)
    if before.stream:
        return Reply(headers, events=again(reply.payload, before.include_usage))
    return Reply(headers, reply.payload)


async def again(payload: bytes, include_usage: bool) -> AsyncGenerator[bytes]:
    for step in events(payload, include_usage=include_usage):
        yield event(step)
    yield LAST


def headers_of(progress: Progress) -> dict[str, str]:
    """Of what was done, as far as it is known when the reply begins."""
    cache: str = progress.state
    if cache not in ("replayed", "passed"):
        cache = "augmented" if progress.shots else "none"
    headers = {
        "x-bottega-route": progress.route,
        "x-bottega-model": _plain(progress.model),
        "x-bottega-cache": cache,
        "x-bottega-demonstrations": str(progress.shots),
    }
    if progress.fallback:
        headers["x-bottega-fallback"] = progress.fallback
    if progress.state == "passed":
        headers["x-bottega-passed"] = progress.why
    if progress.similarity is not None:
        headers["x-bottega-similarity"] = f"{progress.similarity:.4f}"
    if progress.usage.prompt_tokens or progress.state == "replayed":
        headers["x-bottega-prompt-tokens"] = str(progress.usage.prompt_tokens)
        headers["x-bottega-completion-tokens"] = str(progress.usage.completion_tokens)
        if progress.cost_usd is not None:
            headers["x-bottega-cost-usd"] = f"{progress.cost_usd:.8f}"
    if progress.stored is not None:
        headers["x-bottega-stored"] = progress.stored
    return headers


def _plain(model: str) -> str:
    """A model says itself what it is called."""
    if model.isprintable() and len(model) <= LONGEST_NAME:
        return model
    return "".join(c if c.isprintable() else "?" for c in model[:LONGEST_NAME])


def tells_only_usage(payload: bytes) -> bool:
    return b'"usage"' in payload and not orjson.loads(payload).get("choices")
