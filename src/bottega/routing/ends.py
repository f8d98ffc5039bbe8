"""What the routers ask of the tiers they are given."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.protocols import Tier


def ends(tiers: Sequence[Tier]) -> tuple[Tier, Tier]:
    """The apprentice and the master: the cheapest tier and the dearest."""
    checked(tiers)
    return tiers[0], tiers[-1]


def checked(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names) or len(names) < 2:
        raise SettingError(
            f"the tiers are {names}",
            hint="give at least two tiers of different names, the cheapest first",
        )
    return tuple(tiers)


def share(name: str, value: float) -> float:
    if not 0 <= value <= 1:  # NaN is refused, too
        raise SettingError(f"{name} is {value}", hint=f"set {name} between 0 and 1")
    return value
