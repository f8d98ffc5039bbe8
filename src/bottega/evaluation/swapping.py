"""Passages of another question: what is answered behind them comes from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from bottega.errors import SettingError
from bottega.evaluation.answers import answers_of, holds
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.labels import by_id, is_passage, says_which
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query


class ForAnother:
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
        self._told = says_which(data.items)

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
