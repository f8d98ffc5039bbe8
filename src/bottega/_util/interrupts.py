"""Ctrl-C while an event loop runs: cancel its task instead of interrupting a callback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
