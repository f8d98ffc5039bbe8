"""Admission to decoding: a budget of memory for the images of all requests together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from bottega.gateway.fairness import FairSemaphore
from bottega.gateway.refusals import Refusal
from bottega.gateway.workshop import Keeper
from bottega.image import Image
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query

T = TypeVar("T")

MB = 1 << 20
BUDGET = 256 * MB
# Embedders reduce images to less than this many pixels on a side.
REDUCED_SIDE = 512
# More than any codec takes for a pixel and its result: few pixels need no look at their header.
BYTES_A_PIXEL = 40
# Work that takes less does not wait behind work that takes more.
SMALL = 16 * MB
SMALL_BUDGET = 64 * MB
WAIT_SECONDS = 10.0


class DecodeBudget:
    """At most `most_bytes` of decoded images at a time, by an estimate from their headers; beside
    them up to 64 MB of small ones, which never wait for large ones. Large ones are also limited to
    half of the processors, so that decoding does not starve other requests."""

    def __init__(self, most_bytes: int = BUDGET, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.most_bytes = most_bytes
        self.wait_seconds = wait_seconds
        processors = os.cpu_count() or 1
        self._large = FairSemaphore(most_bytes, max(1, processors // 2))
        self._small = FairSemaphore(SMALL_BUDGET, max(4, processors))

    def check(self, images: Collection[Image]) -> None:
        """Raises `Refusal` (413) for images that exceed the whole budget. Blocks."""
        if (need := bytes_needed(images)) > self.most_bytes:
            raise Refusal(
                f"decoding the images of the request takes {need // MB} MB, more than the"
                f" {self.most_bytes // MB} MB that all requests share",
                status=413,
                code="images_too_large",
                param="messages",
                hint="reduce the images first, or send them as JPEG",
            )

    async def run(self, images: Collection[Image], work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` that decodes the images once there is room for them. Raises `Refusal` (429)
        after `wait_seconds`.

        The room is given back when the work has ended, not when the client leaves: a thread that
        decodes cannot be stopped.
        """
        if not images:
            return await work()
        need = BYTES_A_PIXEL * sum(image.width * image.height for image in images)
        if need > SMALL:
            need = await asyncio.to_thread(bytes_needed, images)
        need = min(need, self.most_bytes)
        lane = self._small if need <= min(SMALL, self.most_bytes) else self._large
        try:
            await lane.acquire(need, self.wait_seconds)
        except TimeoutError:
            raise _busy() from None
        running = asyncio.ensure_future(work())
        running.add_done_callback(lambda task: _ended(task, lane, need))
        return await asyncio.shield(running)


def _ended(task: asyncio.Future[T], lane: FairSemaphore, need: int) -> None:
    lane.release(need)
    if not task.cancelled():
        task.exception()  # of a client that left nobody else asks for it


def bytes_needed(images: Collection[Image]) -> int:
    """Estimate the peak of decoding the images one after the other, reduced results kept."""
    costs = [image.cost(REDUCED_SIDE) for image in images]
    return max((one.peak for one in costs), default=0) + sum(one.result for one in costs)


def _busy() -> Refusal:
    return Refusal(
        "the gateway is decoding as many images as it has memory for",
        status=429,
        type="rate_limit_error",
        code="decoding_busy",
        headers={"retry-after": "2"},
        hint="try again in a moment, or send smaller images",
    )


class BudgetedRetriever:
    """Retriever whose embedder decodes the query's images within the budget."""

    def __init__(self, retrieve: Retriever, budget: DecodeBudget) -> None:
        self._retrieve, self._budget = retrieve, budget

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await self._budget.run(query.images, lambda: self._retrieve(query, k))


class BudgetedKeeper:
    """Keeper that decodes and embeds an example's images within the budget."""

    def __init__(self, keeper: Keeper, budget: DecodeBudget) -> None:
        self._keeper, self._budget = keeper, budget

    async def keep(self, example: Example, /) -> str | None:
        return await self._budget.run(example.query.images, lambda: self._keeper.keep(example))
