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
