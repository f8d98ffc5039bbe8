"""Parts that tell how long they took."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter

from bottega.gateway.ports import Keeper, Upstream
from bottega.gateway.telemetry.metrics import Histogram
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query


class TimedUpstream:
    """A stream's time is that until its first event."""

    def __init__(self, upstream: Upstream, seconds: Histogram) -> None:
        self._upstream, self._seconds = upstream, seconds

    @property
    def model(self) -> str:
        return self._upstream.model

    async def complete(self, body: Body, /) -> ChatCompletion:
        start = perf_counter()
        try:
            return await self._upstream.complete(body)
        finally:
            self._seconds.observe(perf_counter() - start)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        async with aclosing(self._upstream.stream(body)) as events:
            with self._seconds.time():
                first = await anext(events, None)
            if first is not None:
                yield first
                async for event in events:
                    yield event

    async def check(self) -> None:
        await self._upstream.check()

    async def aclose(self) -> None:
        await self._upstream.aclose()


class TimedRetriever:
    def __init__(self, retrieve: Retriever, seconds: Histogram) -> None:
        self._retrieve, self._seconds = retrieve, seconds

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        with self._seconds.time():
            return await self._retrieve(query, k)


class TimedKeeper:
    def __init__(self, keeper: Keeper, seconds: Histogram) -> None:
        self._keeper, self._seconds = keeper, seconds

    async def keep(self, example: Example, /) -> str | None:
        with self._seconds.time():
            return await self._keeper.keep(example)
