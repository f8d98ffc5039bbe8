"""Controls: what a method's accuracy owes to the asked picture, and what to the question."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from bottega._util.identity import image_hashes
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, answers_of, holds
from bottega.evaluation.labels import by_id, is_passage, labels_of, names_passages
from bottega.protocols import Prompter, Recorder, Retriever
from bottega.types import Candidate, Example, Prompt, Query, Trace


class SwappedRetriever:
    """What is found for the next item that wants another answer, in another episode if there are
    several.

    What answers the query itself is left out: its own passage where items name theirs, else any
    that holds one of its answers. What the other item finds next takes the place; where nothing is
    left, the item after that one is tried. Raises `SettingError` where no item is left, and for
    items without an id of their own.
    """

    def __init__(self, retrieve: Retriever, data: Benchmark) -> None:
        self._retrieve, self._data = retrieve, data
        self._items = by_id(data.items)
        self._place = {id: place for place, id in enumerate(self._items)}
        self._told = names_passages(data.items)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        item = self._items[str(query.id)]
        for other in self._others(item):
            found = await self._retrieve(other.query, k)
            if not found or (kept := await self._kept(item, other, found, k)):
                return kept if found else []
        raise SettingError(
            "all items have the same answer, or find only what holds it, so there is nothing to"
            " swap",
            hint="ask more items, or leave this control out",
        )

    def _others(self, item: Example) -> Iterator[Example]:
        place, items = self._place[str(item.query.id)], self._data.items
        following = (*items[place + 1 :], *items[:place])
        for apart in (True, False) if self._data.episode_of else (False,):
            for other in following:
                if other.answer != item.answer and self._apart(item, other) is apart:
                    yield other

    def _apart(self, item: Example, other: Example) -> bool:
        one, two = (self._data.episode_of.get(str(each.query.id)) for each in (item, other))
        return one != two

    async def _kept(
        self, item: Example, other: Example, found: list[Candidate], k: int
    ) -> list[Candidate]:
        """The first ones stay what they are: a retriever may draw anew for a larger number."""
        kept = [one for one in found if not self._answers(item, one.example)]
        depth = k
        while len(kept) < k and len(found) >= depth:
            depth *= 2
            found = await self._retrieve(other.query, depth)
            shown = [one.example for one in kept]
            kept += [
                one
                for one in found
                if one.example not in shown and not self._answers(item, one.example)
            ]
        return kept[:k]

    def _answers(self, item: Example, example: Example) -> bool:
        if self._told:
            return str(example.query.id) == item.tags["passage"]
        return is_passage(example) and holds(example.query.text, answers_of(self._data, item))


Identity = tuple[str, tuple[str, ...]]


class SwappedPrompter:
    """Prompts with the query that `other` makes of the asked one. Retrieval and parsing keep the
    asked one, and so does the gold answer."""

    def __init__(self, prompt: Prompter, other: Callable[[Query], Query]) -> None:
        self._prompt = prompt
        self._other = other

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        return self._prompt(self._other(query), demonstrations)


class SwappedQueryRecorder:
    """Records the query that a control really asked; its id stays the item's."""

    def __init__(self, record: Recorder, other: Callable[[Query], Query]) -> None:
        self._record = record
        self._other = other

    async def __call__(self, trace: Trace, /) -> None:
        await self._record(replace(trace, query=self._other(trace.query)))


def other_picture(data: Benchmark, *, seed: int) -> Callable[[Query], Query]:
    """The images of another item, drawn by the seed."""
    alike = "swap-image: all {} items share one picture"
    drawn = _drawn(data, lambda item: ":".join(image_hashes(item.query)), seed, alike)
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
    return query.text, image_hashes(query)


# An example with a wrong answer; None where no answer would be wrong.
Wrong = Callable[[Example, random.Random], Example | None]


def corrupted(
    knowledge: Sequence[Example], share: float, wrong: Wrong, *, seed: int
) -> list[Example]:
    """`share` of all examples answered wrongly, or as many as can be."""
    if not 0 <= share <= 1:
        raise SettingError(f"label noise is {share}", hint="set it to a share between 0 and 1")
    if all(map(is_passage, knowledge)):
        raise SettingError(
            "the examples are passages to read: they have no answers that could be made wrong",
            hint="leave --label-noise out",
        )
    rng = random.Random(f"{seed}:label noise")
    falsified = [wrong(example, rng) for example in knowledge]
    possible = [place for place, example in enumerate(falsified) if example is not None]
    if not possible:
        raise SettingError("no example can be answered wrongly", hint="leave --label-noise out")
    chosen = set(rng.sample(possible, min(len(possible), round(share * len(knowledge)))))
    return [
        (place in chosen and other) or example
        for place, (example, other) in enumerate(zip(knowledge, falsified, strict=True))
    ]


def confused(knowledge: Sequence[Example]) -> Wrong:
    """Another of the question's own choices or, without any, another label of the example's episode
    and topic, so that a wrong answer is a likely one. No rationale: it would tell the right one."""
    known: defaultdict[tuple[str | None, ...], dict[str, None]] = defaultdict(dict)
    for example in knowledge:
        known[_place(example)] |= dict.fromkeys(labels_of(example))

    def wrong(example: Example, rng: random.Random) -> Example | None:
        if len(labels_of(example)) != 1:
            raise SettingError(
                "label noise needs examples with one label each", hint="leave --label-noise out"
            )
        possible = example.query.choices or known[_place(example)]
        others = [label for label in possible if (label,) != labels_of(example)]
        if not others:
            return None
        label = rng.choice(others)
        labels = None if example.labels is None else (label,)
        return replace(example, answer=label, labels=labels, rationale=None)

    return wrong


def _place(example: Example) -> tuple[str | None, ...]:
    return example.tags.get("episode"), example.tags.get("topic")
