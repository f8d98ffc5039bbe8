"""Progress of long work in Python: a callback, or a bar on standard error or in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from bottega import notebook
from bottega.errors import OnError

# Receives the number of steps finished since its last call.
Step = Callable[[int], object]
# A callback; True for a bar; False or None for neither.
Progress = Step | bool | None
# Begins a stage of longer work, given its title and its number of steps.
Stages = Callable[[str, int], AbstractContextManager[Step]]


def plural(count: int, noun: str, spec: str = "") -> str:
    """Return a count with its noun, such as `1 reply` or, with `spec` ",", `2,000 replies`."""
    several = re.sub("(?<![aeiou])y$", "ie", re.sub("ch$", "che", noun)) + "s"
    return f"{count:{spec}} {noun if count == 1 else several}"


def no_stages(title: str, total: int) -> AbstractContextManager[Step]:
    """Show no progress: `Stages` without effect."""
    return nullcontext(lambda steps: None)


class ReportStep(Protocol):
    """Callback for finished steps and their cost in US dollars."""

    def __call__(self, steps: int, cost_usd: float = 0.0, /) -> None: ...


class ProgressDisplay(Protocol):
    """Function that shows the progress of a stage with `total` steps, None if unknown. With
    `most_calls`, it also counts completions, of which there are at most so many (0: unknown)."""

    def __call__(
        self,
        title: str,
        total: int | None,
        *,
        counts_money: bool = False,
        most_calls: int | None = None,
    ) -> AbstractContextManager[ReportStep]: ...


def _no_progress(
    title: str, total: int | None, *, counts_money: bool = False, most_calls: int | None = None
) -> AbstractContextManager[ReportStep]:
    return nullcontext(lambda steps, cost_usd=0.0, /: None)


@dataclass(frozen=True)
class Display:
    """Callbacks that show a long job; without effect by default.

    `note` receives lines of text, `warn` the errors of skipped examples. `waiting` surrounds work
    of unknown length, `progress` a stage whose steps are counted.
    """

    note: Callable[[str], object] = lambda text: None
    warn: OnError = lambda error: None
    waiting: Callable[[str], AbstractContextManager[object]] = nullcontext
    progress: ProgressDisplay = _no_progress


SILENT = Display()


@contextmanager
def showing_progress(title: str, total: int | None, progress: Progress) -> Iterator[Step]:
    """Yield a function that reports finished steps to the callback or the bar. `total` is None if
    the number of steps is unknown."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda steps: None
    elif notebook.is_notebook():
        with notebook.progress_bar(title, total) as advance:
            yield advance
    else:
        with _terminal_bar(title, total) as advance:
            yield advance


@contextmanager
def _terminal_bar(title: str, total: int | None) -> Iterator[Step]:
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps: bar.advance(task, steps)


def size_of(items: Any) -> int | None:
    """Return the number of items, None for a generator."""
    return len(items) if isinstance(items, Sized) else None
