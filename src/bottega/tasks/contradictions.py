"""Synthetic task of contradictory passages, of which only a retrieval score tells the right one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bottega.errors import check_fraction
from bottega.tasks.glyphs import NAMES, Fact, fact_images, fact_passage, query_tags
from bottega.tasks.task import (
    RELATIONS,
    RandomSources,
    TaskData,
    check_images,
    check_range,
    invented_words,
    join_episodes,
    make_example,
    question,
)
from bottega.types import Example

Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ContradictionTask:
    """Task of `episodes`, each with `passages` contradictory passages per name and relation and
    `queries` glyph images. The tag `passage` of an item names the right one, sampled uniformly.

    Its `passage_scores` are in 0..1. With probability `reliability` the right passage has the
    highest one, otherwise a wrong passage. Nothing else depends on `reliability`: a seed gives the
    same texts, images and answers.
    """

    queries: int = 20
    episodes: int = 25
    passages: int = 2
    reliability: float = 0.9

    def __post_init__(self) -> None:
        check_range("queries", self.queries, 1, 500)
        check_range("episodes", self.episodes, 1, 500)
        check_range("passages", self.passages, 2, 10)
        check_fraction("reliability", self.reliability)
        check_images(self.episodes * self.queries, "episodes or queries")

    def generate(self, seed: int) -> TaskData:
        sources, scores = RandomSources(seed), Scores()
        episodes = [self._episode(sources, str(n), scores) for n in range(self.episodes)]
        return replace(join_episodes(episodes), passage_scores=scores)

    def _episode(
        self, sources: RandomSources, episode: str, scores: Scores
    ) -> tuple[list[Example], list[Example]]:
        facts = [(name, relation) for name in NAMES for relation in RELATIONS]
        # The names themselves are excluded.
        words = invented_words(sources.words, len(facts) * self.passages + len(NAMES))
        things = iter([word for word in words if word not in NAMES])
        stated = {fact: [next(things) for _ in range(self.passages)] for fact in facts}
        passages = [
            fact_passage(sources.words, _passage_id(episode, fact, index), episode, fact, thing)
            for fact, versions in stated.items()
            for index, thing in enumerate(versions)
        ]
        return passages, self._queries(sources, episode, stated, scores)

    def _queries(
        self,
        sources: RandomSources,
        episode: str,
        stated: Mapping[Fact, Sequence[str]],
        scores: Scores,
    ) -> list[Example]:
        rng = sources.words
        facts = rng.choices(list(stated), k=self.queries)
        images = fact_images(sources.images, facts)
        items = []
        for number, (fact, image) in enumerate(zip(facts, images, strict=True)):
            id, right = f"contradictions-{episode}-asked-{number}", rng.randrange(self.passages)
            scored = contradictory_scores(rng, right, self.passages, self.reliability)
            scores[id] = {_passage_id(episode, fact, i): one for i, one in enumerate(scored)}
            tags = query_tags(episode, fact, _passage_id(episode, fact, right))
            text, answer = question(rng, fact[1]), stated[fact][right]
            items.append(make_example(id, text, answer, image, tags=tags))
        return items


def contradictory_scores(
    rng: random.Random, right: int, passages: int, reliability: float
) -> list[float]:
    """Return a score in 0..1 for each passage. The highest one belongs to the passage `right` with
    probability `reliability`, otherwise to a random other one. As many random numbers are used
    either way."""
    wrong = rng.choice([index for index in range(passages) if index != right])
    best = right if rng.random() < reliability else wrong
    *others, highest = sorted(rng.random() for _ in range(passages))
    rng.shuffle(others)
    return [*others[:best], highest, *others[best:]]


def _passage_id(episode: str, fact: Fact, index: int) -> str:
    return f"contradictions-{episode}-{'-'.join(fact)}-{index}"
