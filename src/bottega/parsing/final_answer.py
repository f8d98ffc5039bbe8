"""The final answer of a worked solution, where the options may be formulas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from bottega.parsing.replies import (
    before,
    confidence,
    match,
    spoken,
    stated_answers,
    without_confidence,
)
from bottega.types import Answer, Completion, Query

BOXED = re.compile(r"\\?boxed\s*\{")
PHRASE = re.compile(r"\banswer(?:\W{0,3}:| (?:is|should be)\b:?)", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n|\Z")
ONLY_A_LETTER = re.compile(r"\W*(?:\\text(?:bf)?\{\W*)?([A-Za-z])\W*")
LETTER_FIRST = re.compile(r"\(([A-Z])\)|([A-Z])[.):]\s|([A-Z])\n")
LETTER_LAST = re.compile(r"\s\(?([A-Z])\)?\.?\Z")
AROUND = " \t\n*:$"


class FinalAnswerParser:
    r"""Reads the last `\boxed{...}` of the reply, or else the line `Answer: ...`, or else what
    follows "the answer is" up to the end of the sentence, or else the whole reply.

    Of a query with choices a letter is its option, and so is the last or the first letter of a
    reply that names its answer nowhere. What is none of the options is kept as it is: 0.5 may be
    the option \frac{1}{2}, which a metric can tell.
    """

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = spoken(completion.text)
        stated = stated_answers(reply)
        rationale, sure = before(reply, stated), confidence(reply, completion)
        reply = without_confidence(reply)
        line = stated[-1][1] if stated else None
        ways = (_boxed(reply), line, _behind_phrase(reply))
        found = next((way for way in ways if way is not None), None)
        said = (reply if found is None else found).strip(AROUND).removesuffix(".").strip(AROUND)
        if not said:
            return Answer("", valid=False, rationale=rationale)
        letter = _letter(said) or (_letter_last(reply) if found is None else None)
        said = _option(letter, said, query.choices)
        return Answer(said, labels=(said,), confidence=sure, rationale=rationale)


def _boxed(reply: str) -> str | None:
    """The content of the last box, up to the brace that closes it."""
    opened = list(BOXED.finditer(reply))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for at in range(start, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return reply[start:at]
    return reply[start:]


def _behind_phrase(reply: str) -> str | None:
    phrases = list(PHRASE.finditer(reply))
    if not phrases:
        return None
    rest = reply[phrases[-1].end() :].strip(AROUND)
    end = SENTENCE_ENDS.search(rest)
    return rest[: end.start()] if end else rest


def _letter(said: str) -> str | None:
    alone = ONLY_A_LETTER.fullmatch(said) or LETTER_FIRST.match(said)
    return next(filter(None, alone.groups()), "").upper() if alone else None


def _letter_last(reply: str) -> str | None:
    last = LETTER_LAST.search(reply)
    return last[1] if last else None


def _option(letter: str | None, said: str, choices: Sequence[str]) -> str:
    """What was said, if it is no option's letter or text."""
    options = dict(zip(ascii_uppercase, choices, strict=False))
    if letter in options:
        return options[letter]
    bare = [choice.strip(AROUND) for choice in choices]
    named = match(said, bare)
    return said if named is None else choices[bare.index(named)]
