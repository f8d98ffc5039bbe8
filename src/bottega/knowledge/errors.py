"""What happens to an example that cannot be used: the caller decides, by default it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bottega.errors import BottegaError, ImageError, LoadError

Error = TypeVar("Error", bound=BottegaError)

OnError = Callable[[BottegaError], None]
OnRowError = Callable[[LoadError | ImageError], None]


def error_handler(on_error: Callable[[Error], None] | None) -> Callable[[Error], None]:
    # Not `on_error or ...`: a callable that collects errors may be an empty list.
    return _raise if on_error is None else on_error


def _raise(error: BottegaError) -> None:
    raise error
