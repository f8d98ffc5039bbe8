"""Prompts for the tests of this package."""

from __future__ import annotations

from bottega.image import Image
from bottega.types import Message, Prompt
from tests.builders import QUESTION, solid_image


def ask(text: str = "hello") -> Prompt:
    return Prompt((Message("user", (text,)),))


def shown(*shades: int) -> Prompt:
    """Return a prompt with a labelled demonstration per shade; the last shade is the query."""
    turns: list[Message] = []
    for shade in shades[:-1]:
        turns += [user(solid_image(shade)), Message("assistant", (f"label {shade}",))]
    return Prompt((*turns, user(solid_image(shades[-1]))))


def user(image: Image) -> Message:
    return Message("user", (image, QUESTION))
