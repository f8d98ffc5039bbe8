"""Training examples of a compressor from a benchmark with passages. Needs torch."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bottega._util.progress import plural
from bottega.compression.objective import TrainingExample
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, is_passage, is_relevant, names_passages
from bottega.evaluation.methods.prompts import HINT as IMAGES_HINT
from bottega.evaluation.methods.prompts import most_images
from bottega.evaluation.methods.retrieval import (
    UNSCORED,
    bundled_token_embedder,
    late_interaction_score,
)
from bottega.generation.loaded import LoadedModel
from bottega.protocols import MultiVectorEmbedder, Retriever, Vectors
from bottega.types import Candidate, Example

EPISODE = "episode"


class TrainingSampler(ABC):
    """Sampler of training examples, deterministic for a seed and a step.

    Either all examples of a batch have images or none has.
    """

    def __init__(self, items: Sequence[Example], *, seed: int, batch: int) -> None:
        self._kinds = _kinds(items)
        self.seed, self.batch = seed, batch

    def __call__(self, step: int, /) -> list[TrainingExample]:
        return self.sample(self.batch, step)

    def sample(self, count: int, step: int) -> list[TrainingExample]:
        rng = random.Random(f"{self.seed}:{step}")
        items = self._kinds[0]
        if len(self._kinds) > 1:
            items = rng.choices(self._kinds, [len(kind) for kind in self._kinds])[0]
        return [self.make_example(rng.choice(items), rng) for _ in range(count)]

    def of(self, items: Sequence[Example]) -> list[TrainingExample]:
        """Return one training example for each item, the same on each call."""
        rng = random.Random(f"{self.seed}:once")
        return [self.make_example(item, rng) for item in items]

    @abstractmethod
    def make_example(self, item: Example, rng: random.Random) -> TrainingExample: ...


class GoldPassageSampler(TrainingSampler):
    """Training examples of items that name their gold passage.

    The gold passage appears among others of its episode, with late-interaction scores as for
    `concat` and `racc` in `bottega eval`. In a share of `hard` examples, the first others share a
    tag with the gold passage (in facts, the name and the relation). With the benchmark's own
    `scores` (`Benchmark.passage_scores`), all scored passages of an item appear with these.
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
        scores: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(items, seed=seed, batch=batch)
        self.hard, self.shots, self._scores = hard, shots, scores or {}
        self._passages = {str(one.query.id): one for one in passages}
        self._episodes = _by_episode(passages)
        _check(items, passages, _smallest(self._episodes), shots)
        if self._scores:
            _check_scores(self._scores, shots)
            return
        embed = tokens or bundled_token_embedder()
        self._questions = _by_identity(items, embed.embed_queries([one.query for one in items]))
        self._documents = _by_identity(
            passages, embed.embed_documents([one.query for one in passages])
        )

    def make_example(self, item: Example, rng: random.Random) -> TrainingExample:
        gold = self._passages[item.tags["passage"]]
        scored = self._scores.get(str(item.query.id), ())
        shown = [self._passages[id] for id in scored] or [gold]
        episode = self._episodes[gold.tags.get(EPISODE, "")]
        others = [one for one in episode if not _contains(shown, one)]
        if rng.random() < self.hard:
            shown += self._similar(gold, others, self.shots - len(shown), rng)
        others = [one for one in others if not _contains(shown, one)]
        shown += rng.sample(others, self.shots - len(shown))
        rng.shuffle(shown)
        return TrainingExample(
            item.query,
            tuple(shown),
            tuple(self._score(item, one) for one in shown),
            tuple(one is gold for one in shown),
            item.answer,
        )

    def _similar(
        self, gold: Example, others: Sequence[Example], most: int, rng: random.Random
    ) -> list[Example]:
        found: list[Example] = []
        for tag, value in gold.tags.items():
            similar = [one for one in others if one.tags.get(tag) == value and tag != EPISODE]
            unused = [one for one in similar if not _contains(found, one)]
            if unused and len(found) < most:
                found.append(rng.choice(unused))
        return found

    def _score(self, item: Example, passage: Example) -> float:
        if self._scores:
            return self._scores[str(item.query.id)].get(str(passage.query.id), UNSCORED)
        return late_interaction_score(self._questions[id(item)], self._documents[id(passage)])


class RetrievedPassageSampler(TrainingSampler):
    """Training examples of items without a gold passage, from a retriever and with its scores.

    A passage that contains one of the annotated answers (pseudo-relevance) and a demonstration that
    gives one are relevant.
    """

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
        # By object identity: a question may have no id.
        self._found: dict[int, list[Candidate]] = {}

    def make_example(self, item: Example, rng: random.Random) -> TrainingExample:
        found = self._candidates(item)
        return TrainingExample(
            item.query,
            tuple(one.example for one in found),
            tuple(one.score for one in found),
            tuple(is_relevant(self._data, item, one.example) for one in found),
            item.answer,
        )

    def _candidates(self, item: Example) -> list[Candidate]:
        if id(item) not in self._found:
            found = asyncio.run(self._search(item))
            if len(found) < self._shots:
                raise SettingError(
                    f"a training example needs {plural(self._shots, 'passage')}, got {len(found)}"
                    f" for {item.query.text!r}",
                    hint="set shots lower, or change retrieve",
                )
            self._found[id(item)] = found
        return self._found[id(item)]

    async def _search(self, item: Example) -> list[Candidate]:
        return list(await self._retrieve(item.query, self._shots))


def training_items(data: Benchmark) -> tuple[Example, ...]:
    """Return the labelled questions of the knowledge base.

    The knowledge base of a synthetic task holds only passages: such a task trains on its items and
    is evaluated with another seed.
    """
    labelled = tuple(one for one in data.knowledge if not is_passage(one))
    return labelled or data.items


def passages_of(data: Benchmark) -> tuple[Example, ...]:
    """Return the passages of the knowledge base. Raises `SettingError` if there are none."""
    found = tuple(one for one in data.knowledge if is_passage(one))
    if not found:
        raise SettingError(
            f"{data.name} has no passages to compress",
            hint='set passages = "FILE", or benchmark = "facts"',
        )
    return found


def check_training_data(data: Benchmark, shots: int) -> None:
    """Raise `SettingError` for a benchmark with fewer than `shots` passages, or with scores of more
    than `shots` passages for a question."""
    items, passages = training_items(data), passages_of(data)
    if not names_gold_passages(items, passages):
        _check(items, passages, len(passages), shots)
        return
    _check(items, passages, _smallest(_by_episode(passages)), shots)
    if data.passage_scores:
        _check_scores(data.passage_scores, shots)


def check_training_images(
    data: Benchmark, base: LoadedModel, hyper: LoadedModel | None, *, distill: bool
) -> None:
    """Raise `SettingError` for more images than the models of a training take: those of a question
    or of a passage, and with `distill` those of all passages in one prompt."""
    limits = [model.max_images for model in (base, hyper or base) if model.max_images is not None]
    if not limits:
        return
    passages = passages_of(data)
    most = most_images([*passages, *training_items(data)])
    if most > min(limits):
        raise SettingError(
            f"the model takes {min(limits)} image per question or passage, got {most}",
            hint=IMAGES_HINT,
        )
    if distill and base.max_images is not None and most_images(passages):
        raise SettingError(
            "distill needs the images of all passages in one prompt, but the base model takes"
            f" {base.max_images}",
            hint=f"set distill = false, or {IMAGES_HINT}",
        )


def split_validation(
    items: Sequence[Example], count: int, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Split off `count` validation items, which all have images or all have none."""
    kind = max(_kinds(items), key=len)
    if count >= len(kind):
        raise SettingError(
            f"validate must be below the number of questions, got {count} of {len(kind)}",
            hint="set validate lower",
        )
    chosen = random.Random(f"{seed}:aside").sample(kind, count)
    ids = {id(one) for one in chosen}
    return tuple(one for one in items if id(one) not in ids), tuple(chosen)


def names_gold_passages(items: Sequence[Example], passages: Sequence[Example]) -> bool:
    """Return whether every item names one of the passages."""
    ids = {str(one.query.id) for one in passages}
    return names_passages(items) and all(item.tags["passage"] in ids for item in items)


def _kinds(items: Sequence[Example]) -> list[list[Example]]:
    """Group items with images and items without."""
    both = [
        [one for one in items if bool(one.query.images) is has_images]
        for has_images in (True, False)
    ]
    return [kind for kind in both if kind]


def _by_episode(passages: Sequence[Example]) -> dict[str, list[Example]]:
    episodes: defaultdict[str, list[Example]] = defaultdict(list)
    for one in passages:
        episodes[one.tags.get(EPISODE, "")].append(one)
    return episodes


def _smallest(episodes: Mapping[str, Sequence[Example]]) -> int:
    """Return the number of passages of the smallest episode."""
    return min(map(len, episodes.values()), default=0)


def _by_identity(examples: Sequence[Example], rows: Sequence[Vectors]) -> dict[int, Vectors]:
    return {id(one): each for one, each in zip(examples, rows, strict=True)}


def _contains(examples: Sequence[Example], one: Example) -> bool:
    """Compare by object identity: comparing texts and images is slow."""
    return any(one is other for other in examples)


def _check_scores(scores: Mapping[str, Mapping[str, float]], shots: int) -> None:
    if (most := max(map(len, scores.values()))) > shots:
        raise SettingError(
            f"shots must be at least the number of scored passages ({most}), got {shots}",
            hint=f"set shots to {most} or more",
        )


def _check(
    items: Sequence[Example], passages: Sequence[Example], available: int, shots: int
) -> None:
    if not items:
        raise SettingError("the benchmark has no training questions", hint="use another one")
    if available < shots:
        raise SettingError(
            f"shots must be at most the number of passages ({available}), got {shots}",
            hint="set shots lower",
        )
