"""Plan of a run of streams: starts, controls, routers, eviction policies, orders of the items."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from bottega._util.locations import StoreLocation
from bottega.errors import SettingError
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.recipes.cache_retrieval import RetrievalName

Start = Literal["none", "cold", "warm"]
Control = Literal["no-cache", "random", "vote"]
RouterName = Literal["coin", "coverage", "half-first"]
STARTS: tuple[Start, ...] = ("none", "cold", "warm")
CONTROLS: tuple[Control, ...] = ("no-cache", "random", "vote")
ROUTERS: tuple[RouterName, ...] = ("coin", "coverage", "half-first")
APPRENTICE, MASTER = "apprentice", "master"
UNLIMITED = "none"


@dataclass(frozen=True)
class Curve:
    """Streams that differ only in the master's rate and the order of the items.

    `start` is the paper's NoStart, ColdStart or WarmStart. `evict` limits the cache to the run's
    capacity, unless it is "none". A `control` answers without a cache, shows random examples of the
    cache, or replaces the apprentice by a vote of its demonstrations.
    """

    start: Start = "none"
    retrieve: RetrievalName = "image"
    evict: str = UNLIMITED
    control: Control | None = None

    @property
    def name(self) -> str:
        if self.control == "no-cache":
            return "no cache"
        evict = () if self.evict == UNLIMITED else (self.evict,)
        start = "no" if self.start == "none" else self.start
        parts = (f"{start} start", self.retrieve, *evict)
        return ", ".join((self.control, *parts) if self.control else parts)


@dataclass(frozen=True)
class Stream:
    """One stream: a curve at one master's rate, over the items in one order."""

    curve: Curve
    rate: float
    order: int

    @property
    def name(self) -> str:
        return f"{self.curve.name}, master {self.rate:g}, order {self.order}"


def plan_streams(curves: Sequence[Curve], rates: Sequence[float], orders: int) -> list[Stream]:
    """Return all streams, first those of the first order.

    Without a cache, the rates 0 and 1 are the apprentice and the master alone; they need one order.
    """
    planned = [
        Stream(curve, rate, order)
        for order, curve, rate in product(range(1, orders + 1), curves, rates)
    ]
    alone = [
        Stream(curve, rate, 1) for curve in curves if curve.control == "no-cache" for rate in (0, 1)
    ]
    return [*alone, *(one for one in planned if one not in alone)]


def item_orders(answers: Sequence[str], orders: int, seed: int, phases: int = 1) -> list[list[int]]:
    """Return permutations of the indices of items with these gold answers.

    With several phases, the answers are divided among them at random, and a phase holds the items
    of its answers only. Raises `SettingError` if there are fewer different answers than phases.
    """
    if phases > len(set(answers)):
        raise SettingError(
            f"--phases must not exceed the {len(set(answers))} different answers, got {phases}",
            hint="set fewer --phases",
        )
    return [
        _item_order(answers, phases, random.Random(f"{seed}:{n}")) for n in range(1, orders + 1)
    ]


def _item_order(answers: Sequence[str], phases: int, rng: random.Random) -> list[int]:
    order = rng.sample(range(len(answers)), len(answers))
    names = sorted(set(answers))
    rng.shuffle(names)
    phase = {name: position * phases // len(names) for position, name in enumerate(names)}
    return sorted(order, key=lambda index: phase[answers[index]])


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a run of streams, on which all answers depend.

    `tiers` are model names, the master last. `cold` is the number of answers that a cold start
    loads. `groups` None adapts the number of hashtags. `capacity` None: no limit. With several
    `phases`, the answers of the items change from phase to phase.
    """

    benchmark: str
    tiers: Sequence[str]
    router: RouterName
    rates: Sequence[float]
    starts: Sequence[Start]
    retrieve: Sequence[RetrievalName]
    controls: Sequence[Control]
    shots: int
    orders: int
    embed: str
    embed_text: str
    evict: Sequence[str]
    groups: int | None = None
    capacity: int | None = None
    cold: int | None = None
    answers: StoreLocation | None = None
    limit: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    synonyms: Path | None = None
    phases: int = 1
    metric: VectorMetric = "cosine"
    seed: int = 0

    def streams(self) -> list[Stream]:
        """Return all streams, first those of the first order."""
        kinds = product(self.starts, self.retrieve, self.evict)
        curves = [Curve(start, retrieve, evict) for start, retrieve, evict in kinds]
        controls = dict.fromkeys(
            self._control(curve, control) for control in self.controls for curve in curves
        )
        return plan_streams([*curves, *controls], self.rates, self.orders)

    def _control(self, curve: Curve, control: Control) -> Curve:
        """Return a control of a curve. Without a cache there is neither a start nor an eviction,
        and random examples need no retrieval."""
        if control == "no-cache":
            return Curve(retrieve=self.retrieve[0], control=control)
        retrieve = self.retrieve[0] if control == "random" else curve.retrieve
        return replace(curve, retrieve=retrieve, control=control)

    def max_cached(self, items: int, labelled: int) -> int:
        """Return the maximum number of answers in a cache, for a stream of `items` and a corpus of
        `labelled` answers."""
        sizes = {"none": 0, "cold": min(self.cold or 0, labelled), "warm": labelled}
        most = items + max(sizes[start] for start in self.starts)
        return (
            most if self.capacity is None or UNLIMITED in self.evict else min(most, self.capacity)
        )

    @property
    def master(self) -> str:
        """Name of the master's tier."""
        return MASTER if len(self.tiers) == 2 else self.tiers[-1]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StreamConfig:
        """Return the settings of a stored run."""
        return cls(**{one.name: record[one.name] for one in fields(cls)})

    def record(self) -> dict[str, object]:
        """Return the settings as JSON values: a run resumes if these are equal."""
        lists = ("tiers", "rates", "starts", "retrieve", "controls", "evict")
        return {
            **vars(self),
            **{name: list(getattr(self, name)) for name in lists},
            "answers": None if self.answers is None else str(self.answers),
            "synonyms": None if self.synonyms is None else self.synonyms.read_text("utf-8"),
            "model": " and ".join(self.tiers),
        }
