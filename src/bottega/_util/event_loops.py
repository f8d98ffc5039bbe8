"""Event loop in a thread of its own, concurrent work that ends at the first error, and Ctrl-C."""

from __future__ import annotations

import asyncio
import atexit
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from bottega.errors import BottegaError, SettingError

T = TypeVar("T")


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


class BackgroundLoop:
    """Event loop that runs in a daemon thread from the first call until `close`. Callers share one
    instance, because HTTP connections and the like belong to the loop that opened them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result, in any thread but the loop's own. Raise what the
        coroutine raises. An interrupt of the waiting thread (`KeyboardInterrupt`) cancels the
        coroutine."""
        running = self._start()
        if threading.current_thread() is running.thread:
            work.close()
            raise SettingError(
                "a synchronous method was called inside its own event loop",
                hint="await the asynchronous method there, such as pipeline.answer(query)",
            )
        future = asyncio.run_coroutine_threadsafe(work, running.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect if the coroutine has ended
            raise

    def close(self) -> None:
        """Cancel unfinished work, close the loop and join its thread."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None and running.thread.is_alive():
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()

    def _start(self) -> _Running:
        with self._lock:
            # A forked child process has this object but not the thread.
            if self._running is None or not self._running.thread.is_alive():
                started: Future[_Running] = Future()
                threading.Thread(
                    target=_serve, args=(started,), name="bottega-loop", daemon=True
                ).start()
                self._running = started.result()
            return self._running


def _serve(started: Future[_Running]) -> None:
    with asyncio.Runner() as runner:
        loop, ended = runner.get_loop(), False
        started.set_result(_Running(loop, threading.current_thread()))
        while not ended:
            try:
                loop.run_forever()
                ended = True
            except (KeyboardInterrupt, SystemExit):
                # A task that raises one of these stops the loop. Go on: the task's caller gets
                # the exception from its future, and other callers still wait.
                pass


BACKGROUND_LOOP = BackgroundLoop()
# A daemon thread that still runs native code at interpreter exit may crash the process.
atexit.register(BACKGROUND_LOOP.close)


X = TypeVar("X")
V = TypeVar("V")


async def gather_or_cancel(work: Iterable[Awaitable[V]]) -> list[V]:
    """Return all results in order. The first error cancels the rest. It is raised itself, not in an
    exception group; of several errors a `BottegaError` comes first."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in work]
    except ExceptionGroup as errors:
        expected = (one for one in errors.exceptions if isinstance(one, BottegaError))
        raise next(expected, errors.exceptions[0]) from errors
    return [task.result() for task in tasks]


async def for_each(
    items: Iterable[X],
    work: Callable[[X], Awaitable[object]],
    *,
    limit: int,
    starts: Callable[[], bool] = lambda: True,
) -> None:
    """Await `work` for each item, `limit` items at a time. A worker ends when `starts` returns
    False for its next item. Errors as of `gather_or_cancel`."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            if not starts():
                return
            await work(item)

    await gather_or_cancel(worker() for _ in range(limit))


async def _awaited(work: Awaitable[V]) -> V:
    return await work


class AsyncCloseable(Protocol):
    """Object that is closed in the event loop that used it."""

    def aclose(self) -> Awaitable[object]: ...


def run_closing(work: Awaitable[V], *resources: AsyncCloseable) -> V:
    """Run the work in an event loop of its own, and close the resources at its end, also after an
    error or an interrupt. Return its result."""

    async def run() -> V:
        async with AsyncExitStack() as stack:
            for resource in resources:
                stack.push_async_callback(resource.aclose)
            return await work

    return asyncio.run(run())


def _nothing() -> None:
    pass


@dataclass
class DeferredInterrupt:
    """Interrupt that waits for the end of `deferred_interrupts`. `cancel` ends the work that is
    under way."""

    received: bool = False
    cancel: Callable[[], object] = _nothing

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Set `cancel`, and call it if the interrupt came before."""
        self.cancel = cancel
        if self.received:
            cancel()

    def receive(self, *_: object) -> None:
        """Cancel once: a second cancellation would interrupt the cleanup after the first one."""
        if not self.received:
            self.received = True
            self.cancel()


@contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupt]:
    """Within this context Ctrl-C calls `cancel`; `KeyboardInterrupt` is raised at its end.

    Python raises it between any two instructions of the main thread. In a callback of an event loop
    or of a C extension that loses data: a task then waits forever, or the process crashes. Without
    effect in other threads, and if the program has its own handler of SIGINT.
    """
    interrupt = DeferredInterrupt()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.receive)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupt.received:
            raise KeyboardInterrupt
