"""Memory budget for decoding images, shared fairly between clients."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from bottega.gateway.ports import ExampleWriter
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.pixels import DecodeCost
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query

# Client (account id) whose request the current task serves.
CLIENT: ContextVar[str] = ContextVar("client", default="")


@dataclass(eq=False)
class _Waiter:
    need: int
    admitted: asyncio.Future[None]


@dataclass
class FairSemaphore:
    """Weighted semaphore. Waiting clients are admitted in turn, the work of each client in order.
    No work overtakes the next in turn, so large work is not starved."""

    room: int
    at_once: int
    free: int = field(init=False)
    running: int = 0
    waiting: OrderedDict[str, deque[_Waiter]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.free = self.room

    async def acquire(self, need: int, seconds: float | None = None) -> None:
        """Wait for `need` units. Raises `TimeoutError` after `seconds`."""
        if not self.waiting and self._fits(need):
            self._take(need)
            return
        client, waiter = CLIENT.get(), _Waiter(need, asyncio.get_running_loop().create_future())
        self.waiting.setdefault(client, deque()).append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.admitted
        except BaseException:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.release(need)  # admitted at the moment it gave up
            else:
                self._forget(client, waiter)
                self._admit()  # the next waiter may need less
            raise

    def release(self, need: int) -> None:
        self.free += need
        self.running -= 1
        self._admit()

    def _fits(self, need: int) -> bool:
        return need <= self.free and self.running < self.at_once

    def _take(self, need: int) -> None:
        self.free -= need
        self.running += 1

    def _admit(self) -> None:
        while self.waiting:
            client, queue = next(iter(self.waiting.items()))
            if not self._fits(queue[0].need):
                return
            waiter = queue.popleft()
            self.waiting.move_to_end(client)
            if not queue:
                del self.waiting[client]
            if not waiter.admitted.done():  # else it has given up, and `acquire` will clean up
                self._take(waiter.need)
                waiter.admitted.set_result(None)

    def _forget(self, client: str, waiter: _Waiter) -> None:
        queue = self.waiting.get(client, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self.waiting[client]


T = TypeVar("T")
Cost = Callable[[Image], DecodeCost]

MB = 1 << 20
BUDGET = 256 * MB
# Embedders reduce images to less than this many pixels on a side.
REDUCED_SIDE = 512
# Upper bound for every codec, result included (JPEG 2000 of 16 bits): with few pixels the header
# need not be read.
BYTES_PER_PIXEL = 66
# The same for JPEG: the coefficients of four components and three copies of the result.
JPEG_BYTES_PER_PIXEL = 20
JPEG_TYPES = ("image/jpeg", "image/mpo")
# Work that needs at most this much does not wait for larger work.
SMALL = 16 * MB
SMALL_BUDGET = 64 * MB
WAIT_SECONDS = 10.0


def embedding_cost(image: Image) -> DecodeCost:
    return image.decode_cost(REDUCED_SIDE)


class DecodeBudget:
    """Budget of at most `max_bytes` of decoded images at a time, estimated from their headers,
    plus up to 64 MB of small images, which never wait for large ones. Large images are also
    limited to half of the processors, to leave the rest to other requests."""

    def __init__(self, max_bytes: int = BUDGET, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.wait_seconds = wait_seconds
        processors = os.cpu_count() or 1
        self._large = FairSemaphore(max_bytes, max(1, processors // 2))
        self._small = FairSemaphore(SMALL_BUDGET, max(2, processors))

    async def check(self, images: Collection[Image]) -> None:
        """Raise `ApiError` (413) for images that exceed the whole budget."""
        need = max_bytes_needed(images)
        if need > self.max_bytes:
            need = await asyncio.to_thread(bytes_needed, images)
        if need > self.max_bytes:
            raise ApiError(
                f"the images of the request must decode within {self.max_bytes // MB} MB, got"
                f" {need // MB} MB",
                status=413,
                code="images_too_large",
                param="messages",
                hint="reduce the images first, or send them as JPEG",
            )

    async def run(
        self,
        images: Collection[Image],
        work: Callable[[], Awaitable[T]],
        cost: Cost = embedding_cost,
    ) -> T:
        """Run `work`, which decodes the images at `cost` each, once there is memory for them.
        Raises `ApiError` (429) after `wait_seconds`.

        The memory is released when the work has ended, not when the client leaves: a decoding
        thread cannot be stopped.
        """
        if not images:
            return await work()
        need = max_bytes_needed(images)
        if need > SMALL:
            need = await asyncio.to_thread(bytes_needed, images, cost)
        need = min(need, self.max_bytes)  # work above the budget waits until it is alone
        lane = self._small if need <= min(SMALL, self.max_bytes) else self._large
        try:
            await lane.acquire(need, self.wait_seconds)
        except TimeoutError:
            raise ApiError(
                "the gateway has no memory left for decoding images",
                status=429,
                code="decoding_busy",
                headers={"retry-after": "2"},
                hint="try again in a moment, or send smaller images",
            ) from None

        def release(task: asyncio.Future[T]) -> None:
            lane.release(need)
            if not task.cancelled():
                task.exception()  # retrieve it: no caller does after the client has left

        running = asyncio.ensure_future(work())
        running.add_done_callback(release)
        return await asyncio.shield(running)


def max_bytes_needed(images: Collection[Image]) -> int:
    """Return an upper bound of `bytes_needed` for any cost. It suffices for most images, while
    reading their headers needs a thread."""
    return sum(
        (JPEG_BYTES_PER_PIXEL if image.media_type in JPEG_TYPES else BYTES_PER_PIXEL)
        * (image.width * image.height)
        for image in images
    )


def bytes_needed(images: Collection[Image], cost: Cost = embedding_cost) -> int:
    """Estimate the peak in bytes of decoding the images one by one and keeping the results."""
    costs = [cost(image) for image in images]
    return max((one.peak for one in costs), default=0) + sum(one.result for one in costs)


Timer = Callable[[], AbstractContextManager[None]]


class BudgetedRetriever:
    """Retriever whose embedder decodes the query's images within the budget. `timer` measures the
    retrieval without the wait for memory."""

    def __init__(
        self, retrieve: Retriever, budget: DecodeBudget, timer: Timer = nullcontext
    ) -> None:
        self._retrieve, self._budget, self._timer = retrieve, budget, timer

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        async def work() -> list[Candidate]:
            with self._timer():
                return await self._retrieve(query, k)

        return await self._budget.run(query.images, work)


class BudgetedExampleWriter:
    """ExampleWriter that stores an example while its images are decoded within the budget."""

    def __init__(
        self, writer: ExampleWriter, budget: DecodeBudget, timer: Timer = nullcontext
    ) -> None:
        self._writer, self._budget, self._timer = writer, budget, timer

    async def store(self, example: Example, /) -> str | None:
        async def work() -> str | None:
            with self._timer():
                return await self._writer.store(example)

        return await self._budget.run(example.query.images, work)
