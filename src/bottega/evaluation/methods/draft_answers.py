"""Drafts of a run: answers without demonstrations, which some retrieval methods search with."""

from __future__ import annotations

from functools import partial

from bottega._util.caching import SingleFlight
from bottega._util.identity import request_key
from bottega.evaluation.outcomes import add_cost
from bottega.protocols import Generator, Pricer, turns_only
from bottega.types import Prompt, Reply, Sampling


class DraftGenerator:
    """Generator wrapper that answers each prompt once for all methods of a run.

    `calls`, `tokens` and `cost_usd` count the requests sent; the methods' own figures exclude
    drafts. `cost_usd` is None if the price is unknown.
    """

    def __init__(self, inner: Generator, price: Pricer | None = None) -> None:
        self._inner = inner
        self._price = price
        self._replies: dict[str, Reply] = {}
        self._flights: SingleFlight[str, Reply] = SingleFlight()
        self.name = inner.name
        self.turns_only = turns_only(inner)
        self.calls = self.tokens = 0
        self.cost_usd: float | None = 0.0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        key = request_key(self.name, prompt, sampling)
        if (reply := self._replies.get(key)) is not None:
            return reply
        return await self._flights.run(key, partial(self._send, key, prompt, sampling))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _send(self, key: str, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await self._inner.generate(prompt, sampling)
        cost = self._price(reply.model, reply.usage) if self._price else 0.0
        self.calls += 1
        self.tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
        self.cost_usd = add_cost(self.cost_usd, cost)
        self._replies[key] = reply
        return reply
