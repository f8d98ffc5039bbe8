"""Parts of a synthetic task: questions, invented words, examples, items and episodes."""

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

# Every question contains exactly one word of its topic; the rest of the text does not matter.
TOPIC_WORDS: dict[Topic, tuple[str, ...]] = {
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
TOPICS = tuple(TOPIC_WORDS)
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
STATES = ("is", "called", "named")  # the word before the fact in each statement

ONSETS = (
    "b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z",
    "br", "dr", "gl", "kr", "pl", "st", "tr",
)  # fmt: skip
VOWELS = tuple("aeiou")
ENDS = tuple("bdfgklmnprstvx")


def question(rng: random.Random, topic: Topic) -> str:
    """Return a random paraphrase of the topic's question."""
    word = rng.choice(TOPIC_WORDS[topic])
    usual = RELATION_QUESTIONS if topic in RELATIONS else USUAL_QUESTIONS
    return rng.choice(QUESTIONS.get(word, usual)).format(word)


def statement(rng: random.Random, relation: Topic, name: str, thing: str) -> str:
    """Return a random sentence which states that `thing` is the `relation` of `name`."""
    return rng.choice(STATEMENTS).format(rng.choice(TOPIC_WORDS[relation]), name, thing)


def invented_words(rng: random.Random, count: int) -> list[str]:
    """Return `count` distinct meaningless words of two or three syllables."""
    words: dict[str, None] = {}
    while len(words) < count:
        opening = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((1, 1, 2)))]
        last = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS)
        words["".join(opening) + last] = None
    return list(words)


MIN_QUERIES = 500
MIN_EPISODES = 25
# An image takes up to 75 kB (measured): pixels, vector and row in a knowledge base.
MAX_IMAGES = 20_000


@dataclass(frozen=True)
class TaskData:
    """Knowledge base and query items of a synthetic task.

    `labels` are the valid answers of items without choices; empty allows any text. `episode_of`
    maps the id of each example and item to its episode: an item may use examples of its own episode
    only. An empty mapping means one knowledge base for all items. `passage_scores` are a task's own
    retrieval scores, by item id and then by passage id.
    """

    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...] = ()
    episode_of: Mapping[str, str] = field(default_factory=dict)
    passage_scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class RandomSources:
    """Random sources of a task, seeded by the task's seed: `words` and `images`. The seed is
    salted: `training` seeds its generators with small numbers, and a task must not repeat training
    images."""

    def __init__(self, seed: int) -> None:
        self.words = random.Random(f"bottega task {seed}")
        self.images = torch.Generator().manual_seed(self.words.getrandbits(63))


def make_example(
    id: str,
    text: str,
    answer: str,
    image: Image | None,
    *,
    tags: Mapping[str, str],
    choices: tuple[str, ...] = (),
    rationale: str | None = None,
) -> Example:
    """Return an example that shares its id with its query: retrievers identify items by the id."""
    query = Query(text, () if image is None else (image,), choices, id=id)
    return Example(query, answer, rationale=rationale, tags=tags, source="synthetic", id=id)


def to_images(batch: Tensor) -> list[Image]:
    """Encode a batch (n, 3, height, width) with values in 0..1 as PNG images."""
    pixels = (batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.from_pillow(Pillow.fromarray(np.ascontiguousarray(one))) for one in pixels]


def join_episodes(episodes: Iterable[tuple[Sequence[Example], Sequence[Example]]]) -> TaskData:
    """Join (examples, items) pairs, one per episode, into one task."""
    knowledge: list[Example] = []
    items: list[Example] = []
    for examples, queries in episodes:
        knowledge += examples
        items += queries
    episode_of = {str(one.id): one.tags["episode"] for one in (*knowledge, *items)}
    return TaskData(tuple(knowledge), tuple(items), episode_of=episode_of)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise `SettingError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise SettingError(
            f"{name} must be {low} to {high}, got {value}", hint=f"set {name} to {low} to {high}"
        )


def check_images(count: int, options: str) -> None:
    """Raise `SettingError` for a task of more than `MAX_IMAGES` images (about 2 GB)."""
    if count > MAX_IMAGES:
        raise SettingError(
            f"a task must have at most {MAX_IMAGES:,} images, got {count:,}",
            hint=f"lower {options}",
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `SettingError` for a value that is not one of the choices."""
    if value not in choices:
        allowed = " or ".join(choices)
        raise SettingError(
            f"{name} must be {allowed}, got {value!r}", hint=f"set {name}={choices[0]}"
        )
