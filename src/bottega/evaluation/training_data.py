"""What a compressor is taught from: the questions of a benchmark with passages. Needs torch."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from bottega.compression.objective import TrainingExample
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, answers_of, gives
from bottega.evaluation.labels import is_passage, names_passages
from bottega.evaluation.racc_methods import bundled_token_embedder, late_interaction_score
from bottega.protocols import MultiVectorEmbedder, Retriever, Vectors
from bottega.types import Candidate, Example

EPISODE = "episode"


class Drawn(ABC):
    """Lessons by lot, always the same ones for a seed and a step. Those of a batch all have images
    or none has."""

    def __init__(self, items: Sequence[Example], *, seed: int, batch: int) -> None:
        self._kinds = _kinds(items)
        self.seed, self.batch = seed, batch

    def __call__(self, step: int, /) -> list[TrainingExample]:
        return self.drawn(self.batch, step)

    def drawn(self, count: int, step: int) -> list[TrainingExample]:
        rng = random.Random(f"{self.seed}:{step}")
        items = self._kinds[0]
        if len(self._kinds) > 1:
            items = rng.choices(self._kinds, [len(kind) for kind in self._kinds])[0]
        return [self.lesson(rng.choice(items), rng) for _ in range(count)]

    def of(self, items: Sequence[Example]) -> list[TrainingExample]:
        """One for each, always the same."""
        rng = random.Random(f"{self.seed}:once")
        return [self.lesson(item, rng) for item in items]

    @abstractmethod
    def lesson(self, item: Example, rng: random.Random) -> TrainingExample: ...


class GoldPassageLessons(Drawn):
    """Where items say which passage is right: it is shown among others of its episode, scored by
    late interaction as `concat` and `racc` are in `bottega eval`.

    In a share of `hard` lessons the others begin with one for each tag of the right passage that
    has the same (of facts: about the same name, and about the same relation).
    """

    def __init__(
        self,
        items: Sequence[Example],
        passages: Sequence[Example],
        *,
        seed: int,
        shots: int = 5,
        hard: float = 0.5,
        batch: int = 32,
        tokens: MultiVectorEmbedder | None = None,
    ) -> None:
        super().__init__(items, seed=seed, batch=batch)
        self.hard, self.shots = hard, shots
        self._passages = {str(one.query.id): one for one in passages}
        self._episodes: defaultdict[str, list[Example]] = defaultdict(list)
        for one in passages:
            self._episodes[one.tags.get(EPISODE, "")].append(one)
        _check(items, passages, min(map(len, self._episodes.values()), default=0), shots)
        embed = tokens or bundled_token_embedder()
        self._asked = _named(items, embed.embed_queries([one.query for one in items]))
        self._told = _named(passages, embed.embed_documents([one.query for one in passages]))

    def lesson(self, item: Example, rng: random.Random) -> TrainingExample:
        right = self._passages[item.tags["passage"]]
        others = [one for one in self._episodes[right.tags.get(EPISODE, "")] if one is not right]
        shown = [right]
        if rng.random() < self.hard:
            shown += self._alike(right, others, rng)
        left = [one for one in others if not _among(one, shown)]
        shown += rng.sample(left, self.shots - len(shown))
        rng.shuffle(shown)
        return TrainingExample(
            item.query,
            tuple(shown),
            tuple(self._score(item, one) for one in shown),
            tuple(one is right for one in shown),
            item.answer,
        )

    def _alike(
        self, right: Example, others: Sequence[Example], rng: random.Random
    ) -> list[Example]:
        found: list[Example] = []
        for tag, value in right.tags.items():
            alike = [one for one in others if one.tags.get(tag) == value and tag != EPISODE]
            fresh = [one for one in alike if not _among(one, found)]
            if fresh and len(found) + 1 < self.shots:
                found.append(rng.choice(fresh))
        return found

    def _score(self, item: Example, passage: Example) -> float:
        return late_interaction_score(self._asked[id(item)], self._told[id(passage)])


class RetrievedLessons(Drawn):
    """Where items do not: what `retrieve` finds, with its scores. Relevant is what holds one of
    the annotated answers (pseudo-relevance), or a demonstration that gives one."""

    def __init__(
        self,
        data: Benchmark,
        items: Sequence[Example],
        retrieve: Retriever,
        *,
        seed: int,
        shots: int = 5,
        batch: int = 2,
    ) -> None:
        super().__init__(items, seed=seed, batch=batch)
        shown = passages_of(data) if any(map(is_passage, data.knowledge)) else data.knowledge
        _check(items, shown, len(shown), shots)
        self._data, self._retrieve, self._shots = data, retrieve, shots
        # By identity: a question of one's own may have no id.
        self._found: dict[int, list[Candidate]] = {}

    def lesson(self, item: Example, rng: random.Random) -> TrainingExample:
        found, answers = self._candidates(item), answers_of(self._data, item)
        return TrainingExample(
            item.query,
            tuple(one.example for one in found),
            tuple(one.score for one in found),
            tuple(gives(one.example, answers) for one in found),
            item.answer,
        )

    def _candidates(self, item: Example) -> list[Candidate]:
        if id(item) not in self._found:
            found = asyncio.run(self._ask(item))
            if len(found) < self._shots:
                raise SettingError(
                    f"{len(found)} passages are found for {item.query.text!r}, not {self._shots}",
                    hint="show fewer, or find them otherwise",
                )
            self._found[id(item)] = found
        return self._found[id(item)]

    async def _ask(self, item: Example) -> list[Candidate]:
        return list(await self._retrieve(item.query, self._shots))


def training_items(data: Benchmark) -> tuple[Example, ...]:
    """The known questions: those that are asked stay unseen. Drawn tasks, which know passages
    alone, teach what they ask, and are evaluated by another seed."""
    known = tuple(one for one in data.knowledge if not is_passage(one))
    return known or data.items


def passages_of(data: Benchmark) -> tuple[Example, ...]:
    """Raises `SettingError` if there are none."""
    found = tuple(one for one in data.knowledge if is_passage(one))
    if not found:
        raise SettingError(
            f"{data.name} has no passages to compress",
            hint='add some with passages = "FILE", or take facts',
        )
    return found


def split_validation(
    items: Sequence[Example], count: int, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """The others, and `count` to validate by, which all have images or none has."""
    kind = max(_kinds(items), key=len)
    if count >= len(kind):
        raise SettingError(
            f"{count} of {len(kind)} questions are to validate by: none would be left to learn",
            hint="set validate lower",
        )
    chosen = random.Random(f"{seed}:aside").sample(kind, count)
    ids = {id(one) for one in chosen}
    return tuple(one for one in items if id(one) not in ids), tuple(chosen)


def names_gold_passages(items: Sequence[Example], passages: Sequence[Example]) -> bool:
    known = {str(one.query.id) for one in passages}
    return names_passages(items) and all(item.tags["passage"] in known for item in items)


def _kinds(items: Sequence[Example]) -> list[list[Example]]:
    """With images, and without."""
    both = [
        [one for one in items if bool(one.query.images) is pictured] for pictured in (True, False)
    ]
    return [kind for kind in both if kind]


def _named(examples: Sequence[Example], rows: Sequence[Vectors]) -> dict[int, Vectors]:
    return {id(one): each for one, each in zip(examples, rows, strict=True)}


def _among(one: Example, others: Sequence[Example]) -> bool:
    """The very object: to compare texts and pictures would take long."""
    return any(one is other for other in others)


def _check(items: Sequence[Example], passages: Sequence[Example], fewest: int, shots: int) -> None:
    if not items:
        raise SettingError("there are no questions to teach", hint="take another benchmark")
    if fewest < shots:
        raise SettingError(
            f"{shots} passages are to be shown, and there are {fewest}", hint="set shots lower"
        )
