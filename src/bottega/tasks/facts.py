"""Synthetic task of named glyphs; a passage of text contains the answer about each glyph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bottega.tasks.glyphs import NAMES, render_named_glyphs
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
    statement,
    to_images,
)
from bottega.types import Example


@dataclass(frozen=True)
class FactTask:
    """Task of `episodes`, each with one passage per name and relation and `queries` glyph images. A
    passage states an invented fact; a query asks for one relation of the glyph in its image. The
    tag `passage` of an item is the id of the passage with its answer."""

    queries: int = 20
    episodes: int = 25

    def __post_init__(self) -> None:
        check_range("queries", self.queries, 1, 500)
        check_range("episodes", self.episodes, 1, 500)
        check_images(self.episodes * self.queries, "episodes or queries")

    def generate(self, seed: int) -> TaskData:
        sources = RandomSources(seed)
        return join_episodes(self._episode(sources, str(number)) for number in range(self.episodes))

    def _episode(self, sources: RandomSources, episode: str) -> tuple[list[Example], list[Example]]:
        # A distinct invented word for each name and relation; the names themselves are excluded.
        count = len(NAMES) * len(RELATIONS)
        words = invented_words(sources.words, count + len(NAMES))
        things = iter([word for word in words if word not in NAMES])
        facts = {(name, relation): next(things) for name in NAMES for relation in RELATIONS}
        passages = [
            make_example(
                _passage_id(episode, name, relation),
                statement(sources.words, relation, name, thing),
                "",
                None,
                tags={"episode": episode, "name": name, "relation": relation},
            )
            for (name, relation), thing in facts.items()
        ]
        return passages, self._queries(sources, episode, facts)

    def _queries(
        self, sources: RandomSources, episode: str, facts: Mapping[tuple[str, str], str]
    ) -> list[Example]:
        rng = sources.words
        topics = rng.choices(list(facts), k=self.queries)
        names = torch.tensor([NAMES.index(name) for name, _ in topics])
        images = to_images(render_named_glyphs(sources.images, names))
        return [
            make_example(
                f"facts-{episode}-asked-{index}",
                question(rng, relation),
                facts[name, relation],
                image,
                tags={
                    "episode": episode,
                    "name": name,
                    "relation": relation,
                    "topic": relation,
                    "passage": _passage_id(episode, name, relation),
                },
            )
            for index, ((name, relation), image) in enumerate(zip(topics, images, strict=True))
        ]


def _passage_id(episode: str, name: str, relation: str) -> str:
    return f"facts-{episode}-{name}-{relation}"
