"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from bottega._util.progress import Display, plural
from bottega._util.tracing import (
    NO_HEADERS,
    NO_OP_SPAN,
    Attributes,
    ModelCall,
    NoOpSpan,
    use_tracer,
)
from bottega.cli.output import note, notes, waiting, warn

# Without a terminal, the first line appears after this time; each pause is twice as long as the
# one before, up to the longest one. Logs of long runs stay short.
FIRST_SECONDS, LONGEST_SECONDS = 5.0, 300.0


class CallCounter:
    """Tracer that counts completions of models in this process. In a search, whose items all end
    late, they are the first sign of progress. `limit` is their maximum number, 0 if unknown."""

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.count = limit, 0

    def span(self, name: str, attributes: Attributes, /) -> NoOpSpan:
        return NO_OP_SPAN

    def request_span(
        self, name: str, attributes: Attributes, headers: Mapping[str, str], /
    ) -> NoOpSpan:
        return NO_OP_SPAN

    def begin_call(self, call: ModelCall, /) -> CountedCall:
        return CountedCall(self, call)

    def headers(self) -> Mapping[str, str]:
        return NO_HEADERS


class CountedCall(NoOpSpan):
    def __init__(self, counter: CallCounter, call: ModelCall) -> None:
        self._counter, self._call = counter, call

    def end(self, error: BaseException | None = None) -> None:
        self._counter.count += len(self._call.completions)


@dataclass
class ProgressStatus:
    """Progress of a task of `total` steps, None if unknown. A call counts finished steps and their
    cost in US dollars."""

    total: int | None
    calls: CallCounter = field(default_factory=CallCounter)
    done: int = 0
    usd: float = 0.0
    advance: Callable[[int], object] = lambda steps: None

    def __call__(self, steps: int, cost_usd: float = 0.0, /) -> None:
        self.done += steps
        self.usd += cost_usd
        self.advance(steps)

    def count(self, noun: str) -> str:
        """Return text such as `64 of 100 examples`."""
        if self.total is None:
            return plural(self.done, noun)
        return f"{self.done} of {plural(self.total, noun)}"

    def text(self, seconds: float, *, shows_cost: bool = False) -> str:
        """Return the calls, the cost, the elapsed `seconds` and the estimated time left."""
        calls = f"{plural(self.calls.count, 'call', ',')}, " if self.calls.count else ""
        cost = f"{self.usd:.4f} USD, " if shows_cost or self.usd else ""
        return f"{calls}{cost}{_duration(seconds)}{self._left(seconds)}"

    def _left(self, seconds: float) -> str:
        """Return the estimated time left: from the finished steps, else from the calls."""
        done, limit = self.calls.count, self.calls.limit
        if self.total is not None and self.done:
            left = seconds / self.done * max(0, self.total - self.done)
            return f", about {_duration(left)} left"
        if 0 < done < limit:
            return f", at most about {_duration(seconds / done * (limit - done))} left"
        return ""


@contextmanager
def progress(
    title: str,
    total: int | ProgressStatus | None,
    *,
    counts_money: bool = False,
    most_calls: int | None = None,
) -> Iterator[ProgressStatus]:
    """Show the progress of the status that is yielded, or of `total` if that is a status: the
    elapsed time and an estimate of the time left. With `most_calls`, completions count too."""
    calls = CallCounter(most_calls or 0)
    status = total if isinstance(total, ProgressStatus) else ProgressStatus(total, calls)
    with ExitStack() as stack:
        if most_calls is not None:
            stack.enter_context(use_tracer(calls))
        if notes.is_terminal:
            stack.enter_context(_bar(title, status, counts_money))
        else:
            stack.callback(ProgressLines(title, status).close)
        yield status


TERMINAL = Display(note, warn, waiting, progress)


class StatusColumn(ProgressColumn):
    def __init__(self, status: ProgressStatus, *, shows_cost: bool) -> None:
        super().__init__()
        self._status, self._shows_cost = status, shows_cost

    def render(self, task: Task) -> Text:
        return Text(self._status.text(task.elapsed or 0.0, shows_cost=self._shows_cost))


@contextmanager
def _bar(title: str, status: ProgressStatus, counts_money: bool) -> Iterator[None]:
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        StatusColumn(status, shows_cost=counts_money),
        console=notes,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=status.total)
        status.advance = lambda steps: bar.update(task, advance=steps)
        yield


class ProgressLines:
    """Progress as occasional lines for logs, printed by a thread. Tasks that end within `first`
    seconds print none."""

    def __init__(self, title: str, status: ProgressStatus, first: float = FIRST_SECONDS) -> None:
        self._title, self._status, self._pause = title, status, first
        self._started = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bottega-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            status = self._status
            of = "" if status.total is None else f" of {status.total:,}"
            text = status.text(time.monotonic() - self._started)
            note(f"{self._title}: {status.done:,}{of}, {text}")
            self._pause = min(2 * self._pause, LONGEST_SECONDS)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
