"""Progress of long work in Python: a callback, or a bar on standard error or in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from bottega import notebook

# Receives the number of steps finished since its last call.
Step = Callable[[int], object]
# A callback; True for a bar; False or None for neither.
Progress = Step | bool | None
# Begins a stage of longer work, given its title and its number of steps.
Stages = Callable[[str, int], AbstractContextManager[Step]]


def plural(count: int, noun: str, spec: str = "") -> str:
    """Return a count with its noun, such as `1 reply` or, with `spec` ",", `2,000 replies`."""
    return f"{count:{spec}} {noun if count == 1 else re.sub('(?<![aeiou])y$', 'ie', noun) + 's'}"


def no_stages(title: str, total: int) -> AbstractContextManager[Step]:
    """Show no progress: `Stages` without effect."""
    return nullcontext(lambda steps: None)


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
    from rich.console import Console  # slow to import
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps: bar.advance(task, steps)


def size_of(items: Any) -> int | None:
    """Return the number of items, None for a generator."""
    return len(items) if isinstance(items, Sized) else None
