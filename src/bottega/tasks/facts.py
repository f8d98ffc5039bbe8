"""Facts: a picture shows who it is about, a passage tells what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bottega.tasks.glyphs import NAMES, draw_named
from bottega.tasks.task import (
    RELATIONS,
    Seeds,
    Task,
    check_knob,
    check_pictures,
    entry,
    images,
    in_episodes,
    invented_words,
    question,
    statement,
)
from bottega.types import Example


@dataclass(frozen=True)
class Facts:
    """Every episode invents a thing for each name and relation and states it in a passage; `asked`
    pictures of named glyphs come with a question for one relation.

    Items are tagged with the id of the passage that answers them.
    """

    asked: int = 20
    episodes: int = 25

    def __post_init__(self) -> None:
        check_knob("asked", self.asked, 1, 500)
        check_knob("episodes", self.episodes, 1, 500)
        check_pictures(self.episodes * self.asked, "episodes or asked")

    def draw(self, seed: int) -> Task:
        seeds = Seeds(seed)
        return in_episodes(self._episode(seeds, str(number)) for number in range(self.episodes))

    def _episode(self, seeds: Seeds, episode: str) -> tuple[list[Example], list[Example]]:
        told = _things(seeds)
        return _passages(seeds, episode, told), self._asked(seeds, episode, told)

    def _asked(self, seeds: Seeds, episode: str, told: dict[tuple[str, str], str]) -> list[Example]:
        rng = seeds.words
        about = rng.choices(list(told), k=self.asked)
        shown = torch.tensor([NAMES.index(name) for name, _ in about])
        pictures = images(draw_named(seeds.pictures, shown))
        return [
            entry(
                f"facts-{episode}-asked-{place}",
                question(rng, relation),
                told[name, relation],
                picture,
                tags={
                    "episode": episode,
                    "name": name,
                    "relation": relation,
                    "topic": relation,
                    "passage": _passage_id(episode, name, relation),
                },
            )
            for place, ((name, relation), picture) in enumerate(zip(about, pictures, strict=True))
        ]


def _things(seeds: Seeds) -> dict[tuple[str, str], str]:
    """A different thing for every name and relation, none of them a name."""
    count = len(NAMES) * len(RELATIONS)
    words = invented_words(seeds.words, count + len(NAMES))
    things = iter([word for word in words if word not in NAMES])
    return {(name, relation): next(things) for name in NAMES for relation in RELATIONS}


def _passages(seeds: Seeds, episode: str, told: dict[tuple[str, str], str]) -> list[Example]:
    return [
        entry(
            _passage_id(episode, name, relation),
            statement(seeds.words, relation, name, thing),
            "",
            None,
            tags={"episode": episode, "name": name, "relation": relation},
        )
        for (name, relation), thing in told.items()
    ]


def _passage_id(episode: str, name: str, relation: str) -> str:
    return f"facts-{episode}-{name}-{relation}"
