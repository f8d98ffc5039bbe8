"""Controls: what a method's accuracy owes to the asked picture, and what to the question."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.protocols import Prompter, Recorder
from bottega.types import Candidate, Example, Prompt, Query, Trace

Identity = tuple[str, tuple[str, ...]]


class Swapped:
    """Prompts with the query that `other` makes of the asked one. Retrieval and parsing keep the
    asked one, and so does the gold answer."""

    def __init__(self, prompt: Prompter, other: Callable[[Query], Query]) -> None:
        self._prompt = prompt
        self._other = other

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        return self._prompt(self._other(query), demonstrations)


class AsAsked:
    """Records the query that a control really asked; its id stays the item's."""

    def __init__(self, record: Recorder, other: Callable[[Query], Query]) -> None:
        self._record = record
        self._other = other

    async def __call__(self, trace: Trace, /) -> None:
        await self._record(replace(trace, query=self._other(trace.query)))


def other_picture(data: Benchmark, *, seed: int) -> Callable[[Query], Query]:
    """The images of another item, drawn by the seed."""
    alike = "swap-image: all {} items share one picture"
    drawn = _drawn(data, lambda item: ":".join(i.sha256 for i in item.query.images), seed, alike)
    return lambda query: replace(query, images=drawn[_identity(query)].images)


def other_question(data: Benchmark, *, seed: int) -> Callable[[Query], Query]:
    """The text of another item that asks for something else: another topic, where items have one,
    else another text."""
    alike = "swap-question: all {} items ask for one thing"
    drawn = _drawn(data, lambda item: item.tags.get("topic", item.query.text), seed, alike)
    return lambda query: replace(query, text=drawn[_identity(query)].text)


def _drawn(
    data: Benchmark, kind: Callable[[Example], str], seed: int, alike: str
) -> Mapping[Identity, Query]:
    """For every item's query one of another kind; each kind is as likely. `alike` is the complaint
    if there is only one."""
    kinds: defaultdict[str, list[Query]] = defaultdict(list)
    for item in data.items:
        kinds[kind(item)].append(item.query)
    if len(kinds) < 2:
        raise SettingError(
            f"{alike.format(len(data.items))}, so there is nothing to swap",
            hint="ask more items, or leave this control out",
        )
    names, others = list(kinds), {}
    for item in data.items:
        rng = random.Random(f"{seed}:swap:{_identity(item.query)}")
        while (other := rng.choice(names)) == kind(item):
            pass
        others[_identity(item.query)] = rng.choice(kinds[other])
    return others


def _identity(query: Query) -> Identity:
    return query.text, tuple(image.sha256 for image in query.images)
