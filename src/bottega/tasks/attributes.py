"""Attributes: what is asked decides which of a scene's five values is the answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bottega.tasks.scenes import ATTRIBUTES, VALUES, draw_scenes, draw_values
from bottega.tasks.task import Seeds, Task, check_knob, check_word, entry, images
from bottega.tasks.wording import invented_words, question
from bottega.types import Example

WORDS = ("invented", "plain")
COMBINATIONS = ("all", "held-out")
# All of a part are drawn at once, which was measured to take 1.3 MB each: 1.6 GB.
MOST = 1_200


@dataclass(frozen=True)
class Attributes:
    """`kb` scenes to show and `asked` to ask, each with a question for one random attribute.

    Every value of every attribute has one word: an invented one by the seed, or its plain English
    one. With `combos` held-out the asked scenes show only pairs of shape and colour that training
    never draws.
    """

    kb: int = 500
    asked: int = 500
    words: str = "invented"
    combos: str = "all"

    def __post_init__(self) -> None:
        check_knob("kb", self.kb, 1, MOST)
        check_knob("asked", self.asked, 1, MOST)
        check_word("words", self.words, WORDS)
        check_word("combos", self.combos, COMBINATIONS)

    def draw(self, seed: int) -> Task:
        seeds = Seeds(seed)
        words = self._words(seeds)
        shown = draw_values(seeds.pictures, self.kb)
        held_out = True if self.combos == "held-out" else None
        asked = draw_values(seeds.pictures, self.asked, held_out)
        return Task(
            knowledge=_examples(seeds, "shown", shown, words),
            items=_examples(seeds, "asked", asked, words),
            labels=tuple(word for attribute in ATTRIBUTES for word in words[attribute]),
        )

    def _words(self, seeds: Seeds) -> dict[str, tuple[str, ...]]:
        if self.words == "plain":
            return VALUES
        rest = iter(invented_words(seeds.words, sum(map(len, VALUES.values()))))
        return {attribute: tuple(next(rest) for _ in VALUES[attribute]) for attribute in VALUES}


def _examples(
    seeds: Seeds, part: str, values: Tensor, words: dict[str, tuple[str, ...]]
) -> tuple[Example, ...]:
    rng, examples = seeds.words, []
    pictures = images(draw_scenes(seeds.pictures, values))
    for place, (picture, row) in enumerate(zip(pictures, values.tolist(), strict=True)):
        topic = rng.choice(ATTRIBUTES)
        answer = words[topic][row[ATTRIBUTES.index(topic)]]
        text = question(rng, topic)
        id = f"attributes-{part}-{place}"
        examples.append(entry(id, text, answer, picture, tags={"topic": topic}))
    return tuple(examples)
