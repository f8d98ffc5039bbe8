"""Synthetic tasks of new characters, and of facts about named ones that bundled models know."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.image import Image
from bottega.tasks.handwriting import (
    MotorPrograms,
    crisp_style,
    draw_characters,
    integers,
    join,
    paint,
    sample_alphabet,
    sample_mixed_styles,
)
from bottega.tasks.task import (
    MIN_EPISODES,
    MIN_QUERIES,
    RELATIONS,
    RandomSources,
    TaskData,
    check_choice,
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

Fact = tuple[str, str]  # a name and a relation
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
            fact_passage(sources.words, _passage_id(episode, fact), episode, fact, thing)
            for fact, thing in facts.items()
        ]
        return passages, self._queries(sources, episode, facts)

    def _queries(
        self, sources: RandomSources, episode: str, facts: Mapping[Fact, str]
    ) -> list[Example]:
        rng = sources.words
        asked = rng.choices(list(facts), k=self.queries)
        images = fact_images(sources.images, asked)
        return [
            make_example(
                f"facts-{episode}-asked-{index}",
                question(rng, fact[1]),
                facts[fact],
                image,
                tags=query_tags(episode, fact, _passage_id(episode, fact)),
            )
            for index, (fact, image) in enumerate(zip(asked, images, strict=True))
        ]


def fact_passage(rng: random.Random, id: str, episode: str, fact: Fact, thing: str) -> Example:
    """Return the passage that states a fact."""
    name, relation = fact
    tags = {"episode": episode, "name": name, "relation": relation}
    return make_example(id, statement(rng, relation, name, thing), "", None, tags=tags)


def fact_images(rng: torch.Generator, facts: Sequence[Fact]) -> list[Image]:
    """Return images of the names of facts."""
    names = torch.tensor([NAMES.index(name) for name, _ in facts])
    return to_images(render_named_glyphs(rng, names))


def query_tags(episode: str, fact: Fact, passage: str) -> dict[str, str]:
    """Return the tags of a question about a fact, which the `passage` answers."""
    name, relation = fact
    known = {"episode": episode, "name": name, "relation": relation}
    return known | {"topic": relation, "passage": passage}


def _passage_id(episode: str, fact: Fact) -> str:
    return f"facts-{episode}-{'-'.join(fact)}"
