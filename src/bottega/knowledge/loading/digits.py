from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image as Pillow

from bottega.image import Image
from bottega.knowledge.loading.labelled import labelled
from bottega.types import Example

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BRIGHTEST = 16
QUESTION = "Which digit is this?"


def load_digits(*, words: bool = True, question: str = QUESTION) -> Iterator[Example]:
    """scikit-learn's 1,797 handwritten digits in its order: 8 x 8 pixels, bright on black.

    Labels are "zero" to "nine", or "0" to "9" without `words`.
    """
    for number, (image, digit) in enumerate(_pictures()):
        label = WORDS[digit] if words else str(digit)
        source = f"scikit-learn digits, {number}"
        yield labelled(image, (label,), question=question, source=source)


@cache
def _pictures() -> list[tuple[Image, int]]:
    from sklearn import datasets  # a second to import

    digits = datasets.load_digits()
    pixels = (digits.images * (255 / BRIGHTEST)).round().astype(np.uint8)
    return [
        (Image.from_pillow(Pillow.fromarray(one), source=f"scikit-learn digits, {number}"), digit)
        for number, (one, digit) in enumerate(zip(pixels, digits.target.tolist(), strict=True))
    ]
