"""HTML of objects and progress in notebooks: without scripts, escaped and limited in size.

`_repr_html_` methods call `render`. The HTML inherits the notebook's colours and has translucent
borders, so it is readable in light and dark themes. Styles are attributes, because notebooks
remove style elements from untrusted documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bottega import pixels
from bottega.errors import ImageError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEXT = 300  # characters
MAX_IMAGES = 8  # per row
SIDE = 96  # of a thumbnail, in pixels
REFRESH_SECONDS = 0.2


def render(macro: str, *values: object) -> str:
    """Return the HTML of values, rendered by a macro of notebook.html."""
    return str(getattr(_template().module, macro)(*values))


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # slow to import

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(cut=cut, number=number)
    environment.globals.update(thumbnail=thumbnail, max_images=MAX_IMAGES, tiny=pixels.TINY)
    text = files("bottega").joinpath("notebook.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def cut(value: object, length: int = MAX_TEXT) -> str:
    """Return the text of a value, truncated to `length` characters."""
    text = str(value)
    return text if len(text) <= length else f"{text[:length]} […]"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with fixed decimals, a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def thumbnail(image: Any, side: int = SIDE) -> str | None:
    """Return a thumbnail of at most `side` pixels as a data URL, None for a damaged image."""
    try:
        return pixels.data_url(pixels.thumbnail(image.decode(at_least=side), side))
    except ImageError:
        return None


def is_notebook() -> bool:
    """Return whether this process is a notebook kernel."""
    from rich.console import Console  # slow to import

    return Console().is_jupyter


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar in the notebook by some steps, without
    widgets. `total` is None if unknown."""
    from IPython.display import HTML, display  # installed in every notebook

    started = shown = time.monotonic()
    done = 0
    handle = display(HTML(render("progress", title, 0, total, None)), display_id=True)

    def show() -> None:
        left = (time.monotonic() - started) * (total - done) / done if total and done else None
        handle.update(HTML(render("progress", title, done, total, left)))

    def advance(steps: int) -> None:
        nonlocal done, shown
        done += steps
        if time.monotonic() - shown >= REFRESH_SECONDS:
            shown = time.monotonic()
            show()

    try:
        yield advance
    finally:
        show()
