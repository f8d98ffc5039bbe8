"""One namespace at work: how its questions go, and who keeps what the master says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from bottega.pipeline import Pipeline
from bottega.types import Example


class Keeper(Protocol):
    """Stores an example: its id, durable by then; None if it could not be stored."""

    async def keep(self, example: Example, /) -> str | None: ...


class Shown(Protocol):
    """Is told which examples were shown, and what that saved. Blocks."""

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None: ...


@dataclass(frozen=True)
class Workshop:
    """`teachers` are the tiers whose answers become examples; without a `keeper` nothing does."""

    pipeline: Pipeline
    keeper: Keeper | None = None
    cache: Shown | None = None
    teachers: frozenset[str] = frozenset()


class Workshops(Protocol):
    async def open(self, namespace: str, /) -> Workshop: ...
