"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bottega.cli.output import note, notes

# Without a terminal, the first line appears after this time; each pause is twice as long as the
# one before, up to the longest one. Logs of long runs stay short.
FIRST_SECONDS, LONGEST_SECONDS = 15.0, 300.0


class Step(Protocol):
    def __call__(self, steps: int, cost_usd: float = 0.0, /) -> None: ...


@contextmanager
def progress(title: str, total: int | None, *, counts_money: bool = False) -> Iterator[Step]:
    """Yield a function that counts finished steps, with optional cost. Shows the time so far, an
    estimate of the time left, and the rate."""
    if notes.is_terminal:
        with _bar(title, total, counts_money) as step:
            yield step
        return
    lines = ProgressLines(title, total)
    try:
        yield lines.step
    finally:
        lines.close()


@contextmanager
def _bar(title: str, total: int | None, counts_money: bool) -> Iterator[Step]:
    cost = "  {task.fields[usd]:.4f} USD" if counts_money else ""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}" + cost),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=total, usd=0.0, rate="")

        def step(steps: int, cost_usd: float = 0.0, /) -> None:
            speed, usd = bar.tasks[task].speed, bar.tasks[task].fields["usd"]
            rate = "" if speed is None else f"{speed:.1f}/s"
            bar.update(task, advance=steps, usd=usd + cost_usd, rate=rate)

        yield step


class ProgressLines:
    """Progress as occasional lines from a thread, for logs. Work that ends before `first` seconds
    writes none."""

    def __init__(self, title: str, total: int | None, first: float = FIRST_SECONDS) -> None:
        self._title, self._total, self._pause = title, total, first
        self._done, self._usd, self._started = 0, 0.0, time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bottega-progress", daemon=True)
        self._thread.start()

    def step(self, steps: int, cost_usd: float = 0.0, /) -> None:
        self._done += steps
        self._usd += cost_usd

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            note(self.line(time.monotonic() - self._started))
            self._pause = min(2 * self._pause, LONGEST_SECONDS)

    def line(self, seconds: float) -> str:
        """Return the progress after so many seconds."""
        count = f"{self._done:,}" if self._total is None else f"{self._done:,} of {self._total:,}"
        text = f"{self._title}: {count} after {_duration(seconds)}"
        if self._usd:
            text += f", {self._usd:.4f} USD"
        if self._total is None or not 0 < self._done <= self._total:
            return text
        left = seconds / self._done * (self._total - self._done)
        return f"{text}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
