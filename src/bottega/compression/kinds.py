"""What has pictures and what has none: a processor takes either in one batch, not both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bottega.types import Example


def kinds(pictured: Sequence[bool]) -> list[list[int]]:
    """The places of those with pictures and of those without, those there are."""
    both = [[place for place, one in enumerate(pictured) if one is kind] for kind in (True, False)]
    return [places for places in both if places]


def parts(passages: Sequence[Example]) -> list[list[Example]]:
    return [[passages[place] for place in places] for places in kinds(_pictured(passages))]


def read_apart(passages: Sequence[Example], read: Callable[[Sequence[Example]], Tensor]) -> Tensor:
    """(passages, ...): what `read` makes of each kind, put together in their order."""
    places = [place for kind in kinds(_pictured(passages)) for place in kind]
    rows = torch.cat([read(part) for part in parts(passages)])
    return rows[torch.tensor(places).argsort().to(rows.device)]


def _pictured(passages: Sequence[Example]) -> list[bool]:
    return [bool(one.query.images) for one in passages]
