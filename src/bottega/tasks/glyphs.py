"""Glyphs with names: the one set of characters that the bundled models are taught by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.image import Image
from bottega.tasks.handwriting import Programs, alphabet, draw, integers, join
from bottega.tasks.nuisance import crisp_style, mixed_styles, paint
from bottega.tasks.task import (
    LEAST_ASKED,
    LEAST_EPISODES,
    Seeds,
    Task,
    check_knob,
    check_pictures,
    check_word,
    entry,
    images,
    in_episodes,
    invented_words,
)
from bottega.types import Example

NAMES = (
    "babra", "cedol", "dimar", "fosin", "gulet", "hapok", "jirun", "kelba",
    "lomid", "mupar", "nasik", "pelod", "quvin", "ratem", "sobil", "tukan",
    "vadro", "wimel", "xanot", "yerib", "zulof", "brask", "clune", "drifo",
)  # fmt: skip
SEED = 314


@functools.cache
def named_glyphs() -> Programs:
    """One glyph a name, of two strokes at least."""
    letters = alphabet(torch.Generator().manual_seed(SEED), 4 * len(NAMES), library=40)
    return letters.rows((letters.count >= 2).nonzero()[: len(NAMES), 0])


def draw_named(rng: torch.Generator, name: Tensor, jitter: float = 1.0) -> Tensor:
    """(n, 3, 64, 64) in 0..1, the glyphs of `name` (n,), each in a style of its own."""
    style = mixed_styles(rng, torch.arange(len(name)))
    style.resolution = integers(rng, 2, (len(name),))
    strokes = draw(rng, named_glyphs().rows(name), style.boldness, style.fill, 0.1, jitter)
    return paint(rng, strokes, style)


QUESTION = "Which character is it?"
STYLES = ("crisp", "any")


@dataclass(frozen=True)
class Glyphs:
    """Every episode has `ways` new characters, `shots` drawings of each to show and one to ask.

    With `alphabets` 1 all of them share one alphabet's strokes, as in Omniglot's within-alphabet
    task. `style` crisp is white on black at full resolution; any draws one style an episode.
    """

    ways: int = 20
    shots: int = 1
    alphabets: int = 1
    style: str = "crisp"

    def __post_init__(self) -> None:
        check_knob("ways", self.ways, 2, 100)
        check_knob("shots", self.shots, 1, 50)
        check_knob("alphabets", self.alphabets, 1, self.ways)
        check_word("style", self.style, STYLES)
        check_pictures(self.episodes * self.ways * (self.shots + 1), "ways or shots")

    @property
    def episodes(self) -> int:
        return max(LEAST_EPISODES, -(-LEAST_ASKED // self.ways))

    def draw(self, seed: int) -> Task:
        seeds = Seeds(seed)
        task = in_episodes(self._episode(seeds, str(number)) for number in range(self.episodes))
        return replace(task, labels=tuple(dict.fromkeys(item.answer for item in task.items)))

    def _episode(self, seeds: Seeds, episode: str) -> tuple[list[Example], list[Example]]:
        names = tuple(invented_words(seeds.words, self.ways))
        pictures = self._pictures(seeds.pictures)
        drawn = [
            entry(
                f"glyphs-{episode}-{place}",
                QUESTION,
                names[place // (self.shots + 1)],
                picture,
                choices=names,
                tags={"episode": episode},
            )
            for place, picture in enumerate(pictures)
        ]
        asked = drawn[:: self.shots + 1]
        shown = [one for place, one in enumerate(drawn) if place % (self.shots + 1)]
        seeds.words.shuffle(shown)
        return shown, asked

    def _pictures(self, rng: torch.Generator) -> list[Image]:
        """The `shots` + 1 drawings of a character in a row."""
        letters = self._letters(rng)
        rows = torch.arange(self.ways).repeat_interleave(self.shots + 1)
        one = torch.zeros(len(rows), dtype=torch.long)
        crisp = self.style == "crisp"
        style = crisp_style(len(rows)) if crisp else mixed_styles(rng, one, shared=1.0)
        strokes = draw(rng, letters.rows(rows), style.boldness, style.fill, free=0.0)
        return images(paint(rng, strokes, style))

    def _letters(self, rng: torch.Generator) -> Programs:
        shares = torch.arange(self.ways).tensor_split(self.alphabets)
        return join([alphabet(rng, len(share)) for share in shares])
