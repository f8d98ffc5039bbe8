"""Plan of a run of streams: starts, controls, routers, eviction policies, orders of the items."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from bottega._util.locations import StoreLocation
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import (
    ANSWER_TOKENS,
    KNOWLEDGE_BASE,
    LIMIT,
    SEED,
    STOP,
    SYNONYMS,
    parse_names,
)
from bottega.evaluation.methods.retrieval import check_retrieval_options
from bottega.evaluation.search_config import option
from bottega.knowledge.eviction import EVICTIONS
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.naming import check_embedder, check_model, default_embedder, model_for, suggestion
from bottega.recipes.cache_retrieval import RETRIEVE, RetrievalName

Start = Literal["none", "cold", "warm"]
Control = Literal["no-cache", "random", "vote"]
RouterName = Literal["coin", "coverage", "half-first"]
STARTS: tuple[Start, ...] = ("none", "cold", "warm")
CONTROLS: tuple[Control, ...] = ("no-cache", "random", "vote")
ROUTERS: tuple[RouterName, ...] = ("coin", "coverage", "half-first")
APPRENTICE, MASTER = "apprentice", "master"
UNLIMITED = NONE = "none"
# Size of MMMU's development set, the paper's cold start, relative to its validation set.
COLD_SHARE = 0.17


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


def _one_of(option: str, allowed: Collection[str], text: str) -> str:
    if text in allowed:
        return text
    raise SettingError(
        f"{option} must be one of {', '.join(allowed)}, got {text!r}",
        hint=f"{suggestion(text, allowed)}set e.g. {option} {next(iter(allowed))}",
    )


def _some_of(option: str, allowed: Collection[str], text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_one_of(option, allowed, one.strip()) for one in text.split(",")))


def _controls(text: str) -> tuple[str, ...]:
    if text == NONE:
        return ()
    if NONE in text.split(","):
        raise SettingError(f"--controls none excludes the others, got {text}", hint="remove none")
    return _some_of("--controls", CONTROLS, text)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise SettingError(
            f"--master-rate must be shares between 0 and 1, got {text!r}",
            hint="set e.g. --master-rate 0.1,0.2,0.3",
        )
    return rates


def _tiers(text: str) -> tuple[str, ...]:
    names = parse_names(text)
    if len(names) < 2:
        raise SettingError(
            f"--tiers must name two models or more, got {text}",
            hint="add another model; the master is the last one",
        )
    return names


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a run of streams, on which all answers depend. The fields are options
    of `bottega stream`.

    `tiers` are model names, the master last; the first of two may be empty. `StreamRun` chooses an
    empty model, `embed` and `evict`, and `cold` if it is None. `cold` is the number of answers that
    a cold start loads. `groups` None adapts the number of hashtags. `capacity` None: no limit. With
    several `phases`, the answers of the items change from phase to phase.
    """

    benchmark: str = ""
    tiers: Sequence[str] = option(
        "Two or more models, comma-separated, the cheapest first and the master last, "
        "instead of --master and --apprentice.",
        (),
        metavar="LIST",
        parser=_tiers,
    )
    router: RouterName = option(
        "Router: coin (random), coverage (the items least similar to the cache go to "
        "the master) or half-first (half of the master's share first, then random).",
        "coin",
        metavar="NAME",
        parser=partial(_one_of, "--router", ROUTERS),
    )
    rates: Sequence[float] = option(
        "Shares of the items that go to the master, comma-separated.",
        (0.1, 0.3, 0.5, 0.7, 0.9),
        flags=("--master-rate",),
        metavar="LIST",
        parser=_rates,
    )
    starts: Sequence[Start] = option(
        "Contents of the cache at the start, comma-separated: none (empty), cold (some"
        " of the master's answers to the labelled questions), warm (all of them).",
        ("none",),
        flags=("--start",),
        metavar="LIST",
        parser=partial(_some_of, "--start", STARTS),
    )
    retrieve: Sequence[RetrievalName] = option(
        f"Retrieval methods, comma-separated: {', '.join(RETRIEVE)}.",
        ("image",),
        metavar="LIST",
        parser=partial(_some_of, "--retrieve", RETRIEVE),
    )
    controls: Sequence[Control] = option(
        "Controls, comma-separated: no-cache (no demonstrations, also for the"
        " apprentice alone and the master alone), random (random examples of the cache), vote"
        " (a vote of the demonstrations instead of the apprentice); or none.",
        CONTROLS,
        metavar="LIST",
        parser=_controls,
    )
    shots: int = option("Number of demonstrations.", 1, min=1)
    orders: int = option("Number of orders of the items.", 5, min=1)
    phases: int = option(
        "Number of drift phases; each has the items of other gold answers.", 1, min=1
    )
    capacity: int | None = option("Maximum number of cached examples.", min=1)
    evict: Sequence[str] = option(
        "Eviction policies with --capacity, comma-separated: lru, lfu, least-saving, "
        "fifo, random, or none (no limit).",
        (),
        metavar="LIST",
        parser=partial(_some_of, "--evict", (UNLIMITED, *EVICTIONS)),
        show_default="lru with --capacity",
    )
    groups: int | None = option(
        "Number of groups of hashtag methods.", min=1, show_default="adapted to the cache"
    )
    cold: int | None = option(
        "Number of answers in a cold start.",
        min=1,
        show_default="17 % of the items, as in the paper",
    )
    answers: StoreLocation | None = option(
        "Take the master's answers to the labelled questions from this file of `bottega"
        " answer` instead of asking the master.",
        **KNOWLEDGE_BASE,
    )
    limit: int | None = field(default=None, metadata=LIMIT)
    embed: str = option(
        "Image embedder, as for eval.",
        "",
        metavar="NAME",
        show_default="photos-both for photographs if its extra is installed, else bundled",
    )
    embed_text: str = option(
        "Text embedder: words, minilm or FOLDER:text.", "", metavar="NAME", show_default="words"
    )
    metric: VectorMetric = option(
        "Distance between vectors; l2 changes the results of raw-average only.",
        "cosine",
        metavar="cosine|l2",
    )
    max_tokens: int = option("Maximum tokens of a reply.", ANSWER_TOKENS, min=1)
    stop: tuple[str, ...] = field(default=(), metadata=STOP)
    seed: int = field(default=0, metadata=SEED)
    synonyms: Path | None = field(default=None, metadata=SYNONYMS)

    def check(self) -> None:
        """Raise `SettingError` for a setting that is invalid or has no effect."""
        if self.capacity is None and not set(self.evict) <= {UNLIMITED}:
            raise SettingError(
                f"--evict {','.join(self.evict)} needs a capacity, got none",
                hint="add e.g. --capacity 100",
            )
        starts = set(self.starts)
        unlimited = self.capacity is not None and set(self.evict) == {UNLIMITED}
        unused = (
            ("--answers", self.answers is not None and starts == {"none"}, "--start warm"),
            ("--cold", self.cold is not None and "cold" not in starts, "--start cold"),
            ("--capacity", unlimited, "--evict lru"),
        )
        for name, is_unused, other in unused:
            if is_unused:
                raise SettingError(f"{name} has no effect", hint=f"remove it, or add {other}")
        if len(self.tiers) < 2 or not self.tiers[-1]:
            raise SettingError("a stream needs a master, got none", hint="add --master openai:NAME")
        for name in filter(None, self.tiers):
            check_model(name)
        check_retrieval_options(
            self.retrieve,
            embed_text=self.embed_text or None,
            metric=self.metric,
            groups=self.groups,
        )
        if self.embed:
            check_embedder(self.embed)

    def chosen(self, data: Benchmark) -> StreamConfig:
        """Return the settings with the defaults for a benchmark."""
        images = (image for one in data.knowledge for image in one.query.images)
        embed = self.embed or default_embedder(images)
        tiers = tuple(name or model_for(embed) for name in self.tiers)
        for name in tiers:
            check_model(name)
        return replace(
            self,
            tiers=tiers,
            embed=embed,
            embed_text=self.embed_text or "words",
            evict=self.evict or ("lru" if self.capacity else UNLIMITED,),
            cold=self.cold or round(COLD_SHARE * len(data.items)),
        )

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
