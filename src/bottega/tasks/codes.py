"""Synthetic task of codes, and a simulated reader for whom the order of demonstrations matters.

Each notebook has its own key: how far letters and digits are moved. A labelled example is a page
that decodes one letter or one digit; a query is a page with both. Pages of a notebook have similar
colours, so retrieval finds some pages of the right notebook among others. `CodeReader` learns the
letter's key from the first demonstration only, and the digit's key from a later one. No network is
involved: the task separates the parts of a search over sequences of demonstrations.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
from PIL import Image as Pillow

from bottega.image import Image
from bottega.tasks.task import RandomSources, TaskData, check_images, check_range, make_example
from bottega.types import Completion, Example, Prompt, Reply, Sampling, Usage

SIDE = 8
LETTERS, DIGITS = ascii_uppercase, "0123456789"
CODE = re.compile(r"Decode ([A-Z]?)([0-9]?)\.")
ANSWER = re.compile(r"([A-Z]?)([0-9]?)")


@dataclass(frozen=True)
class Key:
    """How far the letters and the digits of a notebook are moved."""

    letter: int
    digit: int

    def decode(self, letter: str, digit: str) -> str:
        moved = letter and LETTERS[(LETTERS.index(letter) + self.letter) % len(LETTERS)]
        return moved + (digit and DIGITS[(int(digit) + self.digit) % len(DIGITS)])


# The key that a reader without demonstrations knows.
USUAL = Key(3, 1)


@dataclass(frozen=True)
class CodeTask:
    """Task of `notebooks`, each with as many pages of one letter as of one digit: `examples` in
    all. `usual` percent of the notebooks have the usual key. Colours of a notebook's pages differ
    by `spread` percent of the range."""

    notebooks: int = 60
    examples: int = 6
    queries: int = 10
    usual: int = 10
    spread: int = 6

    def __post_init__(self) -> None:
        check_range("notebooks", self.notebooks, 1, 500)
        check_range("examples", self.examples, 2, 200)
        check_range("queries", self.queries, 1, 200)
        check_range("usual", self.usual, 0, 100)
        check_range("spread", self.spread, 0, 100)
        check_images(
            self.notebooks * (self.examples + self.queries), "notebooks, examples or queries"
        )

    def generate(self, seed: int) -> TaskData:
        rng = RandomSources(seed).words
        knowledge: list[Example] = []
        items: list[Example] = []
        for number in range(self.notebooks):
            known = rng.random() < self.usual / 100
            key = USUAL if known else Key(rng.randrange(1, 26), rng.randrange(1, 10))
            colour = np.array([rng.uniform(0, 255) for _ in range(3)])
            name = f"codes-{number}"
            for index in range(self.examples):
                letter, digit = rng.choice(LETTERS), rng.choice(DIGITS)
                code = (letter, "") if index % 2 else ("", digit)
                knowledge.append(self._page(f"{name}-shown-{index}", key, code, colour, rng))
            for index in range(self.queries):
                code = rng.choice(LETTERS), rng.choice(DIGITS)
                items.append(self._page(f"{name}-asked-{index}", key, code, colour, rng))
        rng.shuffle(items)  # a limited run has items of all notebooks
        return TaskData(tuple(knowledge), tuple(items))

    def _page(
        self,
        id: str,
        key: Key,
        code: tuple[str, str],
        colour: np.ndarray[tuple[int], np.dtype[np.float64]],
        rng: random.Random,
    ) -> Example:
        shade = [part + rng.gauss(0, 2.55 * self.spread) for part in colour]
        pixels = np.tile(np.clip(shade, 0, 255).astype(np.uint8), (SIDE, SIDE, 1))
        # No two pages are equal: an image identifies its page.
        pixels[0] = np.frombuffer(rng.randbytes(3 * SIDE), np.uint8).reshape(SIDE, 3) // 8
        image = Image.from_pillow(Pillow.fromarray(pixels))
        tags = {"notebook": id.split("-")[1]}
        return make_example(id, f"Decode {''.join(code)}.", key.decode(*code), image, tags=tags)


class CodeReader:
    """Simulated model that reads codes by a fixed procedure (see `read`), for `CodeTask`.

    A sample at a temperature replaces each character with probability `slip` times the temperature.
    """

    name = "simulated:codes"
    turns_only = True

    def __init__(self, slip: float = 0.1) -> None:
        self.slip = slip

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        texts = [
            (one.role, " ".join(part for part in one.parts if isinstance(part, str)))
            for one in prompt.messages
        ]
        *turns, (_, question) = texts
        pairs = zip(turns[::2], turns[1::2], strict=True)
        answer = read([(asked, given) for (_, asked), (_, given) in pairs], question)
        digest = hashlib.sha256(repr((texts, sampling.seed)).encode()).digest()
        rng = random.Random(digest)
        samples = [self._sample(answer, sampling.temperature, rng) for _ in range(sampling.n)]
        words = sum(len(text.split()) for _, text in texts)
        return Reply(self.name, tuple(samples), Usage(words, sampling.n))

    async def aclose(self) -> None:
        """Release nothing."""

    def _sample(self, answer: str, temperature: float, rng: random.Random) -> Completion:
        chance = min(1.0, self.slip * temperature)
        text, logprob = "", 0.0
        for character in answer:
            alphabet = LETTERS if character in LETTERS else DIGITS
            slipped = rng.random() < chance
            text += rng.choice(alphabet) if slipped else character
            logprob += math.log(chance / len(alphabet) if slipped else 1 - chance * 0.9)
        return Completion(text, logprob=logprob)


def read(demonstrations: Sequence[tuple[str, str]], question: str) -> str:
    """Decode the question's code with the keys that the demonstrations show.

    The letter's key comes from the first demonstration, if it has a letter; the digit's key from
    the first one with a digit, if the first of all has a letter. What they do not show is decoded
    with the usual key.
    """
    letter, digit = USUAL.letter, USUAL.digit
    shown = [_moves(asked, given) for asked, given in demonstrations]
    if shown and shown[0][0] is not None:
        letter = shown[0][0]
        digit = next((move for _, move in shown if move is not None), digit)
    code = CODE.search(question)
    return Key(letter, digit).decode(code[1], code[2]) if code else "unknown"


def _moves(asked: str, given: str) -> tuple[int | None, int | None]:
    """Return how far the letter and the digit of a demonstration are moved, if it has them."""
    code, answer = CODE.search(asked), ANSWER.fullmatch(given.strip())
    if code is None or answer is None:
        return None, None
    letter = digit = None
    if code[1] and answer[1]:
        letter = (LETTERS.index(answer[1]) - LETTERS.index(code[1])) % len(LETTERS)
    if code[2] and answer[2]:
        digit = (int(answer[2]) - int(code[2])) % len(DIGITS)
    return letter, digit
