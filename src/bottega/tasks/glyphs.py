"""Synthetic task of new characters, and the set of named glyphs that the bundled models know."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.image import Image
from bottega.tasks.handwriting import (
    MotorPrograms,
    draw_characters,
    integers,
    join,
    sample_alphabet,
)
from bottega.tasks.nuisance import crisp_style, paint, sample_mixed_styles
from bottega.tasks.task import (
    MIN_EPISODES,
    MIN_QUERIES,
    RandomSources,
    TaskData,
    check_choice,
    check_images,
    check_range,
    invented_words,
    join_episodes,
    make_example,
    to_images,
)
from bottega.types import Example

NAMES = (
    "babra", "cedol", "dimar", "fosin", "gulet", "hapok", "jirun", "kelba",
    "lomid", "mupar", "nasik", "pelod", "quvin", "ratem", "sobil", "tukan",
    "vadro", "wimel", "xanot", "yerib", "zulof", "brask", "clune", "drifo",
)  # fmt: skip
SEED = 314


@functools.cache
def named_glyphs() -> MotorPrograms:
    """Return one glyph per name, each with at least two strokes."""
    letters = sample_alphabet(torch.Generator().manual_seed(SEED), 4 * len(NAMES), library=40)
    return letters.rows((letters.count >= 2).nonzero()[: len(NAMES), 0])


def render_named_glyphs(rng: torch.Generator, name: Tensor, jitter: float = 1.0) -> Tensor:
    """Render the glyphs of `name` (n,), each in its own style: (n, 3, 64, 64) in 0..1."""
    style = sample_mixed_styles(rng, torch.arange(len(name)))
    style.resolution = integers(rng, 2, (len(name),))
    strokes = draw_characters(
        rng, named_glyphs().rows(name), style.boldness, style.fill, 0.1, jitter
    )
    return paint(rng, strokes, style)


QUESTION = "Which character is it?"
STYLES = ("crisp", "any")


@dataclass(frozen=True)
class GlyphTask:
    """Task of episodes with `ways` new characters: `shots` example images and one query each.

    With `alphabets=1` all characters share the strokes of one alphabet, as in Omniglot's
    within-alphabet task. The style "crisp" is white on black at full resolution; "any" samples one
    style per episode.
    """

    ways: int = 20
    shots: int = 1
    alphabets: int = 1
    style: str = "crisp"

    def __post_init__(self) -> None:
        check_range("ways", self.ways, 2, 100)
        check_range("shots", self.shots, 1, 50)
        check_range("alphabets", self.alphabets, 1, self.ways)
        check_choice("style", self.style, STYLES)
        check_images(self.episodes * self.ways * (self.shots + 1), "ways or shots")

    @property
    def episodes(self) -> int:
        return max(MIN_EPISODES, -(-MIN_QUERIES // self.ways))

    def generate(self, seed: int) -> TaskData:
        sources = RandomSources(seed)
        task = join_episodes(self._episode(sources, str(number)) for number in range(self.episodes))
        return replace(task, labels=tuple(dict.fromkeys(item.answer for item in task.items)))

    def _episode(self, sources: RandomSources, episode: str) -> tuple[list[Example], list[Example]]:
        names = tuple(invented_words(sources.words, self.ways))
        images = self._images(sources.images)
        rendered = [
            make_example(
                f"glyphs-{episode}-{index}",
                QUESTION,
                names[index // (self.shots + 1)],
                image,
                choices=names,
                tags={"episode": episode},
            )
            for index, image in enumerate(images)
        ]
        queries = rendered[:: self.shots + 1]
        examples = [one for index, one in enumerate(rendered) if index % (self.shots + 1)]
        sources.words.shuffle(examples)
        return examples, queries

    def _images(self, rng: torch.Generator) -> list[Image]:
        """Render each character `shots` + 1 times; images of one character are consecutive."""
        shares = torch.arange(self.ways).tensor_split(self.alphabets)
        letters = join([sample_alphabet(rng, len(share)) for share in shares])
        rows = torch.arange(self.ways).repeat_interleave(self.shots + 1)
        group = torch.zeros(len(rows), dtype=torch.long)
        crisp = self.style == "crisp"
        style = crisp_style(len(rows)) if crisp else sample_mixed_styles(rng, group, shared=1.0)
        strokes = draw_characters(rng, letters.rows(rows), style.boldness, style.fill, free=0.0)
        return to_images(paint(rng, strokes, style))
