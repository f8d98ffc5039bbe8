"""Output of commands: text and tables on stdout, notes on stderr, or one JSON document."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bottega.errors import BottegaError, NoticeError, SettingError

# Files and pipes have no width: rows are never folded.
console = Console(width=None if sys.stdout.isatty() else 10_000, emoji=False)
notes = Console(stderr=True, emoji=False)  # keeps progress and warnings out of stdout
# Control characters in labels and replies, except line ends and tabs; and Unicode characters that
# change the text direction of the rest of the line.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Warnings printed for each kind of error; the others are counted.
SHOWN_SIMILAR = 3


def check_output(path: Path | None) -> None:
    """Raise `SettingError` if the file cannot be written. Call it before expensive work."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingError(f"{path} is not writable", hint="set a file in an existing folder")


def print_result(json: bool, document: object, text: str) -> None:
    """Print the document as JSON, or else the text."""
    if json:
        print_json(document)
    else:
        say(text)


def print_json(document: object) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(to_json(document))
    sys.stdout.buffer.flush()


def to_json(document: object) -> bytes:
    """Return a document as UTF-8 JSON; undecodable bytes of file names become question marks."""
    text = json.dumps(document, default=_plain, ensure_ascii=False, indent=2)
    return f"{text}\n".encode(errors="replace")


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


def shown(value: object, style: str = "") -> Text:
    """Return text for the terminal, without markup and control characters."""
    return Text(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(value)), style=style)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with right-aligned numeric columns and an unbroken first column."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[i]) for row in rows)
        table.add_column(
            name,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric or i == 0,
        )
    for row in rows:
        table.add_row(*(shown(_cell(value)) for value in row))
    console.print(table)


def _is_number(value: object) -> bool:
    """Return whether a cell is a number or a bound such as `< 0.001`."""
    if isinstance(value, str):
        return value.startswith("< ")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def format_usd(value: float) -> str:
    """Format an amount with four decimals, or more for two significant digits."""
    decimals = 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(4, decimals), 12)}f}"


def say(text: str) -> None:
    console.print(shown(text), soft_wrap=True)


def note(text: str) -> None:
    notes.print(shown(text, "dim"), soft_wrap=True)


def warn(error: BottegaError, *, about: str = "") -> None:
    """Print a warning, or a note; `about` names the subject if the error does not."""
    if isinstance(error, NoticeError):
        note(str(error))
        return
    text = str(error) if about in str(error) else f"{about}: {error}"
    hint = f" ({error.hint})" if error.hint else ""
    notes.print(shown("skipped: ", "yellow") + shown(text + hint), soft_wrap=True)


class SkippedExamples(list[BottegaError]):
    """Errors of skipped examples. The first of each kind are also printed as warnings; errors of
    one kind have the same type and hint. If `strict`, the first error is raised."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self._strict = strict
        self._kinds: dict[tuple[type, str], list[BottegaError]] = {}

    def __call__(self, error: BottegaError, /) -> None:
        if isinstance(error, NoticeError):
            warn(error)
            return
        if self._strict:
            raise error
        self.append(error)
        similar = self._kinds.setdefault((type(error), error.hint or str(error)), [])
        similar.append(error)
        if len(similar) <= SHOWN_SIMILAR:
            warn(error)

    def warn_of_rest(self) -> None:
        """Print the numbers of errors that were not printed, once."""
        for similar in self._kinds.values():
            if (more := len(similar) - SHOWN_SIMILAR) > 0:
                text = f"and {more:,} more like {similar[0]}"
                notes.print(shown("skipped: ", "yellow") + shown(text), soft_wrap=True)
        self._kinds.clear()

    @property
    def reasons(self) -> list[dict[str, str]]:
        return [{"reason": str(error), "hint": error.hint} for error in self]


@contextmanager
def noting_interruption(text: Callable[[], str]) -> Iterator[None]:
    """Note what is stored and how to resume if Ctrl-C ends the block; `text` returns both."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted: {text()}")
        raise


def at_terminal() -> bool:
    """Return whether a user can answer questions."""
    return sys.stdin.isatty()


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")


def waiting(title: str) -> AbstractContextManager[object]:
    """Return a spinner for work of unknown length; on a terminal only."""
    return notes.status(title) if notes.is_terminal else nullcontext()
