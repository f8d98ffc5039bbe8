"""What the model card promises: copying from the most similar demonstration, and "unknown"."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from PIL import Image as Pillow
from PIL import ImageDraw

from bottega import Image, Interleaved, Prompt, Query, Sampling, Transformers, bundled
from bottega.bundled import bundled_folder
from bottega.types import Candidate, Example

LABELS = ["zero", "Straße nach Süden", "犬", "a_much-longer label, with (punctuation) 12.5 %"]
PROMPT = Interleaved(show_choices=False)
MAX_FOLDER_BYTES = 8_000_000


@pytest.fixture(scope="module")
def model() -> Iterator[Transformers]:
    generator = bundled()
    yield generator
    asyncio.run(generator.aclose())


def drawing(kind: int) -> Image:
    """Four figures that nobody would confuse."""
    picture = Pillow.new("RGB", (64, 64), "black")
    pen = ImageDraw.Draw(picture)
    if kind == 0:
        pen.ellipse((12, 12, 52, 52), outline="white", width=5)
    elif kind == 1:
        pen.line((32, 8, 32, 56), fill="white", width=5)
    elif kind == 2:
        pen.line([(10, 54), (32, 10), (54, 54), (10, 54)], fill="white", width=5)
    else:
        pen.line([(10, 10), (54, 10), (10, 54), (54, 54)], fill="white", width=5)
    return Image.from_pillow(picture)


def question(kind: int, text: str = "What is in the image above?") -> Query:
    return Query(text, (drawing(kind),))


def demonstrations(text: str = "What is in the image above?") -> list[Candidate]:
    examples = [Example(question(kind, text), label) for kind, label in enumerate(LABELS)]
    return [Candidate(example, 0.0) for example in examples]


async def ask(model: Transformers, prompt: Prompt) -> str:
    return (await model.generate(prompt, Sampling(max_tokens=64))).completions[0].text


@pytest.mark.parametrize("kind", range(len(LABELS)))
async def test_the_label_of_the_same_figure_is_copied_whole(model: Transformers, kind: int) -> None:
    assert await ask(model, PROMPT(question(kind), demonstrations())) == LABELS[kind]


async def test_the_order_of_the_demonstrations_does_not_matter(model: Transformers) -> None:
    backwards = demonstrations()[::-1]
    assert await ask(model, PROMPT(question(1), backwards)) == LABELS[1]


async def test_words_of_a_label_in_the_question_do_not_sway_it(model: Transformers) -> None:
    text = "Is it zero, zero or rather zero? Answer with zero unless it is not."
    assert await ask(model, PROMPT(question(2, text), demonstrations(text))) == LABELS[2]


async def test_without_demonstrations_it_says_unknown(model: Transformers) -> None:
    assert await ask(model, PROMPT(question(0), [])) == "unknown"


def test_the_folder_keeps_to_its_size() -> None:
    assert sum(file.stat().st_size for file in bundled_folder().iterdir()) <= MAX_FOLDER_BYTES
