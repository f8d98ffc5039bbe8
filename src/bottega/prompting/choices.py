"""A question's own choices, by letter."""

from __future__ import annotations

from string import ascii_uppercase

from bottega.errors import SettingError
from bottega.types import Example, Query

OPTION = "({letter}) {choice}"


def lettered(query: Query, option: str = OPTION) -> str:
    """The question, and below it each choice on a line. Raises `SettingError` for more than 26."""
    if len(query.choices) > len(ascii_uppercase):
        raise SettingError(
            f"there are {len(query.choices)} choices and only {len(ascii_uppercase)} letters",
            hint="use Interleaved, which shows the choices without letters",
        )
    named = zip(ascii_uppercase, query.choices, strict=False)
    listed = (option.format(letter=letter, choice=choice) for letter, choice in named)
    return "\n".join([query.text, *listed])


def has_letters(query: Query) -> bool:
    return 0 < len(query.choices) <= len(ascii_uppercase)


def listed(query: Query, option: str = OPTION) -> str:
    """As `lettered`, but in words where there are more choices than letters."""
    if has_letters(query):
        return lettered(query, option)
    return "\n".join([query.text, *(f"- {choice}" for choice in query.choices)])


def letter_of(example: Example) -> str:
    """Of its answer; an answer that is none of its choices stays what it is."""
    choices = example.query.choices
    if example.answer not in choices:
        return example.answer
    return ascii_uppercase[choices.index(example.answer)]
