"""What happens to an example that cannot be used: the caller decides, by default it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bottega.errors import BottegaError, ImageError, LoadError

Error = TypeVar("Error", bound=BottegaError)

OnBad = Callable[[BottegaError], None]
OnBadRow = Callable[[LoadError | ImageError], None]


def or_raise(on_bad: Callable[[Error], None] | None) -> Callable[[Error], None]:
    # Not `on_bad or ...`: a callable that collects errors may be an empty list.
    return _raise if on_bad is None else on_bad


def _raise(error: BottegaError) -> None:
    raise error
