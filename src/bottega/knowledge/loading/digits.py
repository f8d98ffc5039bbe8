from __future__ import annotations

from collections.abc import Iterator

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
    from sklearn import datasets  # a second to import

    digits = datasets.load_digits()
    pixels = (digits.images * (255 / BRIGHTEST)).round().astype(np.uint8)
    for number, (picture, digit) in enumerate(zip(pixels, digits.target, strict=True)):
        source = f"scikit-learn digits, {number}"
        image = Image.from_pillow(Pillow.fromarray(picture), source=source)
        label = WORDS[digit] if words else str(digit)
        yield labelled(image, (label,), question=question, source=source)
