"""Executor port: actors that process the items of a long job, in this process or in workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

ItemIn = TypeVar("ItemIn", contravariant=True)
ValueOut = TypeVar("ValueOut", covariant=True)
T = TypeVar("T")
R = TypeVar("R")


class Actor(Protocol[ItemIn, ValueOut]):
    """Computation with state that is expensive to build, such as a loaded model.

    Calls run concurrently on one event loop, so actors run blocking work in threads.
    """

    async def __call__(self, item: ItemIn, /) -> ValueOut: ...

    async def aclose(self) -> None: ...


# Builds an actor; may block. Worker processes need a factory that can be pickled.
ActorFactory = Callable[[], Actor[T, R]]


class Executor(Protocol):
    """Source of workers: this process or a cluster. `count` is the number of processes."""

    @property
    def count(self) -> int: ...

    def start(self, factory: ActorFactory[T, R], *, concurrency: int) -> Actor[T, R]:
        """Start workers, each with its own actor and at most `concurrency` calls at a time. Return
        them as one actor, whose workers share the items of a job. Blocks. Errors of the factory are
        raised here or by the first calls.

        A call computes one item and raises the error of that item; later calls are not affected.
        The caller limits the number of concurrent calls (`event_loops.for_each`), stores each
        result and enforces the budget. Cancelling a call cancels the work. A worker process that
        ends during an item is replaced and the item is retried. `WorkerError` is raised after
        several failures.
        """
        ...

    def close(self) -> None:
        """End all workers. Blocks."""
        ...


class LocalExecutor:
    """Executor with one actor in this process, called in the event loop of the caller."""

    count = 1

    def start(self, factory: ActorFactory[T, R], *, concurrency: int) -> Actor[T, R]:
        return factory()

    def close(self) -> None:
        pass


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items. The last one may be shorter."""
    pending = iter(items)
    while batch := list(islice(pending, size)):
        yield batch


def computed_ahead(
    items: Iterable[T], compute: Callable[[T], R], ahead: int
) -> Iterator[tuple[T, Callable[[], R]]]:
    """Yield each item in order with a function that returns `compute(item)` or raises its error.

    Up to `ahead` items are computed in threads before they are yielded. With 1, each item is
    computed in the caller's thread, when its function is called.
    """
    if ahead <= 1:
        for item in items:
            yield item, partial(compute, item)
        return
    pool = ThreadPoolExecutor(ahead, thread_name_prefix="bottega-ahead")
    waiting: deque[tuple[T, Callable[[], R]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(compute, item).result))
            if len(waiting) > ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        pool.shutdown(cancel_futures=True)
