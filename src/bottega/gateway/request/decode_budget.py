"""Memory budgets for decoding images and for bodies, shared fairly between clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from bottega._util.caching import FairSemaphore
from bottega.gateway.ports import ExampleWriter, Receive, Send
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.pixels import DecodeCost
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query

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
RECEIVED_BYTES = 512 * MB
# Bodies of at most this size never wait: gateway.max_concurrent bounds them well enough.
SMALL_BODY = 64 * 1024
# The rest of a refused body is awaited so long after its last byte.
LINGER_SECONDS = 1.0
# A body may take so long, and a second more for each of these bytes.
BODY_SECONDS, BODY_BYTES_PER_SECOND = 120.0, 64 * 1024
CHECKS = 20  # for late bodies, in the time after which a body has stalled


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
            client = await lane.acquire(need, self.wait_seconds)
        except TimeoutError:
            raise ApiError(
                "the gateway has no memory left for decoding images",
                status=429,
                code="decoding_busy",
                headers={"retry-after": "2"},
                hint="try again in a moment, or send smaller images",
            ) from None

        def release(task: asyncio.Future[T]) -> None:
            lane.release(need, client)
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

    async def store(self, example: Example, /, *, pin: bool = False) -> str | None:
        async def work() -> str | None:
            with self._timer():
                return await self._writer.store(example, pin=pin)

        return await self._budget.run(example.query.images, work)


class BodyBudget:
    """Budget of at most `max_bytes` of bodies that are being received, by their stated length.
    Clients take turns; one that is sending leaves a quarter to each other one. Without a new byte
    for `stalled_seconds`, a body is rejected."""

    stalled_seconds = 20.0
    wait_seconds = 30.0  # stalled bodies end meanwhile

    def __init__(self, max_bytes: int = RECEIVED_BYTES) -> None:
        quarter = max_bytes // 4
        self.bytes = FairSemaphore(max_bytes, reserved=quarter, share=quarter)
        self.watched: dict[BodyReceiver, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def receiver(self, content_length: str | None, receive: Receive) -> BodyReceiver:
        """Return `receive` within the limits of the budget, until it is released. Nothing is
        reserved before its first call, which so must come after the check of the key."""
        length = content_length or ""
        return BodyReceiver(self, int(length[:20]) if length.isdecimal() else 0, receive)

    def watch(self, receiver: BodyReceiver) -> None:
        """End late waits of the receiver until it is released. One timer serves all: one for each
        message took a tenth of the time of a repeat."""
        self.watched[receiver] = None
        if self._timer is None:
            self._schedule_check()

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.stalled_seconds / CHECKS, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for receiver in self.watched:
            receiver.end_late_wait(loop.time())
        if self.watched:
            self._schedule_check()


class BodyReceiver:
    """Receiver of the messages of one request. Raises `ApiError` (408, 503)."""

    def __init__(self, budget: BodyBudget, length: int, receive: Receive) -> None:
        self._budget, self._length, self._receive = budget, length, receive
        self._received, self._is_complete, self._is_late = 0, False, False
        self._task: asyncio.Task[Any] | None = None
        self._begun = 0.0  # with the first message
        self._waits_since: float | None = None  # for the next message
        self._refusal: ApiError | None = None
        self._held: list[tuple[int, str]] = []

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._is_complete:  # what follows is the disconnect
            return await self._receive()
        if self._received or self._length > SMALL_BODY:
            message = await self._receive_in_time()
        else:  # mostly the whole body: a timer would cost more than the rest
            message = await self._receive()
        self._received += len(message.get("body", b""))
        self._is_complete = not message.get("more_body")
        return message

    async def _receive_in_time(self) -> MutableMapping[str, Any]:
        if max(self._length, self._received) > SMALL_BODY:
            await self._reserve()
        self._waits_since = asyncio.get_running_loop().time()
        if self._task is None:
            self._begun = self._waits_since
            self._budget.watch(self)
        self._task = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self._is_late or self._task is None or self._task.uncancel():
                raise
            raise ApiError(
                "the body of the request did not arrive in time",
                status=408,
                code="body_timeout",
                headers={"connection": "close"},
                hint="send it without pauses, or in smaller requests",
            ) from None
        finally:
            self._waits_since = None

    def end_late_wait(self, now: float) -> None:
        """End the wait for a message that is late."""
        if self._task is None or self._waits_since is None:  # while the gateway is at work
            return
        latest = self._begun + BODY_SECONDS + self._received / BODY_BYTES_PER_SECOND
        if now >= min(self._waits_since + self._budget.stalled_seconds, latest):
            self._is_late, self._waits_since = True, None
            self._task.cancel()

    def lingering(self, send: Send) -> Send:
        """Return a `send` that reads the rest of a refused body before it ends the response. A
        connection that is closed with unread bytes is reset, and the client loses the response."""
        if 0 < self._length <= SMALL_BODY:
            return send

        async def send_lingering(message: Any) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if self._refusal is None or not is_last:
                await send(message)
                return
            await send({**message, "more_body": True})
            self._refusal.__traceback__ = None  # its frames keep what was received
            self.release()
            await self._discard()
            await send({"type": "http.response.body"})

        return send_lingering

    async def _discard(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._budget.stalled_seconds
        with suppress(TimeoutError):
            while not self._is_complete:
                async with asyncio.timeout_at(min(latest, loop.time() + LINGER_SECONDS)):
                    self._is_complete = not (await self._receive()).get("more_body")

    def release(self) -> None:
        self._budget.watched.pop(self, None)
        self._task = None  # the task's frames refer to this receiver
        for need, client in self._held:
            self._budget.bytes.release(need, client)
        self._held.clear()

    async def _reserve(self) -> None:
        """Reserve the length, and of a body without one a megabyte at a time. Only the first
        megabyte waits: bodies that hold some and wait for more could wait for each other."""
        if self._length and self._held:
            return
        lane, reserved = self._budget.bytes, sum(need for need, _ in self._held)
        wanted = self._length or (self._received // MB + 1) * MB
        most = lane.room - lane.reserved  # a longer body must leave room for other clients, too
        if (need := min(wanted, most) - reserved) > 0:
            seconds = 0.0 if self._held else self._budget.wait_seconds
            try:
                self._held.append((need, await lane.acquire(need, seconds)))
            except TimeoutError:
                self._refusal = ApiError(
                    "the gateway is receiving too many large bodies",
                    status=503,
                    code="receiving_busy",
                    headers={"retry-after": "2"},
                    hint="try again in a moment, or send fewer large requests at a time",
                )
                raise self._refusal from None
