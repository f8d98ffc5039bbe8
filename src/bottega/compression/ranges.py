"""Which numbers make sense in settings."""

from __future__ import annotations

import math

from bottega.errors import SettingError

LARGEST_SEED = 2**63 - 1  # what torch, numpy and random all take


def check_range(
    settings: object, *names: str, low: float, high: float = math.inf, open: bool = False
) -> None:
    """From `low` to `high`, with `open` more than `low`. Raises `SettingError`, for nan and inf
    too."""
    for name in names:
        value = getattr(settings, name)
        # Nan is in no range.
        if not (low <= value <= high) or (open and value == low) or value == math.inf:
            least = f"more than {low:g}" if open else f"{low:g} or more"
            raise SettingError(
                f"{name} is {value}",
                hint=f"set {name} to {least}" + (f", at most {high}" if high < math.inf else ""),
            )
