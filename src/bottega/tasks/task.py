"""What every drawn task is made of: examples to show, items to ask, and their episodes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from bottega.errors import SettingError
from bottega.image import Image
from bottega.types import Example, Query

Topic = str

# Every question holds exactly one of its topic's words; everything else in it is padding.
ASKED_BY: dict[Topic, tuple[str, ...]] = {
    "shape": ("shape", "form", "outline"),
    "colour": ("colour", "hue", "tint"),
    "texture": ("texture", "pattern", "backdrop"),
    "count": ("count", "many", "quantity"),
    "place": ("place", "corner", "quarter"),
    "symbol": ("symbol", "sign", "operator"),
    "home": ("home", "house", "dwelling"),
    "food": ("food", "meal", "dish"),
    "friend": ("friend", "companion", "ally"),
    "tool": ("tool", "instrument", "device"),
    "fear": ("fear", "dread", "terror"),
    "owner": ("owner", "keeper", "guardian"),
}
TOPICS = tuple(ASKED_BY)
RELATIONS = TOPICS[6:]

QUESTIONS: dict[str, tuple[str, ...]] = {
    "many": ("How many are there?", "Say how many you can see.", "How many things is that?"),
    "symbol": ("What does the symbol make of them?", "Use the symbol. What comes out?"),
    "sign": ("What does this sign stand for here?", "Apply the sign to both sides."),
    "operator": ("Work out what the operator gives.", "What is the value after the operator?"),
}
USUAL_QUESTIONS = (
    "What {} is it?",
    "Which {} do you see here?",
    "Tell me the {}.",
    "Look at the picture and name the {} of the things in it.",
)
RELATION_QUESTIONS = ("What is its {}?", "Tell me the {} of this one.", "Which {} does it have?")
STATEMENTS = (
    "The {} of {} is {}",
    "It was the {} of {} that people called {}",
    "In the end the {} of {} was named {}",
)
STATES = ("is", "called", "named")  # the word right before what a statement states

ONSETS = (
    "b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z",
    "br", "dr", "gl", "kr", "pl", "st", "tr",
)  # fmt: skip
VOWELS = tuple("aeiou")
ENDS = tuple("bdfgklmnprstvx")


def question(rng: random.Random, topic: Topic) -> str:
    """One of the topic's paraphrases."""
    word = rng.choice(ASKED_BY[topic])
    usual = RELATION_QUESTIONS if topic in RELATIONS else USUAL_QUESTIONS
    return rng.choice(QUESTIONS.get(word, usual)).format(word)


def statement(rng: random.Random, relation: Topic, name: str, thing: str) -> str:
    return rng.choice(STATEMENTS).format(rng.choice(ASKED_BY[relation]), name, thing)


def invented_words(rng: random.Random, count: int) -> list[str]:
    """`count` different words of two or three syllables that mean nothing."""
    words: dict[str, None] = {}
    while len(words) < count:
        opening = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((1, 1, 2)))]
        last = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS)
        words["".join(opening) + last] = None
    return list(words)


LEAST_ASKED = 500
LEAST_EPISODES = 25
# With its pixels, vector and row in a knowledge base a picture was measured to take up to 75 kB.
MOST_PICTURES = 20_000


@dataclass(frozen=True)
class Task:
    """`labels` are the admissible answers of items that bring no choices; empty where any text may
    be answered. `episode_of` maps the id of every example and item to its episode: an item is
    answered from its own episode alone. Empty: one knowledge base for all.
    """

    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...] = ()
    episode_of: Mapping[str, str] = field(default_factory=dict)


class Seeds:
    """The two random sources of a task, both a function of its seed: words and pictures.

    Salted: `training` seeds its generators with small numbers, and no task may repeat its pictures.
    """

    def __init__(self, seed: int) -> None:
        self.words = random.Random(f"bottega task {seed}")
        self.pictures = torch.Generator().manual_seed(self.words.getrandbits(63))


def entry(
    id: str,
    text: str,
    answer: str,
    picture: Image | None,
    *,
    tags: Mapping[str, str],
    choices: tuple[str, ...] = (),
    rationale: str | None = None,
) -> Example:
    """An example whose id is its query's, too: retrievers know an item by it."""
    query = Query(text, () if picture is None else (picture,), choices, id=id)
    return Example(query, answer, rationale=rationale, tags=tags, source="drawn", id=id)


def images(pictures: Tensor) -> list[Image]:
    """(n, 3, height, width) in 0..1 as PNG."""
    pixels = (pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.from_pillow(Pillow.fromarray(np.ascontiguousarray(one))) for one in pixels]


def in_episodes(episodes: Iterable[tuple[Sequence[Example], Sequence[Example]]]) -> Task:
    """A task of episodes, each of which draws what it shows and what it asks, in this order."""
    knowledge: list[Example] = []
    items: list[Example] = []
    for shown, asked in episodes:
        knowledge += shown
        items += asked
    episode_of = {str(one.id): one.tags["episode"] for one in (*knowledge, *items)}
    return Task(tuple(knowledge), tuple(items), episode_of=episode_of)


def check_knob(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SettingError(f"{name} is {value}", hint=f"{name} may be {low} to {high}")


def check_pictures(count: int, knobs: str) -> None:
    """Raises `SettingError` for a whole task that would not fit into about 2 GB."""
    if count > MOST_PICTURES:
        raise SettingError(
            f"the task would draw {count:,} pictures",
            hint=f"it may draw {MOST_PICTURES:,} in all: lower {knobs}",
        )


def check_word(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise SettingError(f"{name} is {value!r}", hint=f"{name} may be {' or '.join(known)}")
