"""Parser of the final answer of a worked solution."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from bottega.parsing.answers import (
    drop_confidence,
    find_choice,
    find_stated_answers,
    first_turn,
    rationale_before,
    read_confidence,
    strip_thinking,
)
from bottega.parsing.formulas import values_differ
from bottega.parsing.labels import stated_label
from bottega.types import Answer, Completion, Query

BOXED = re.compile(r"\\?boxed\s*\{")
PHRASE = re.compile(r"\banswer(?:\W{0,3}:| (?:is|should be)\b:?)", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n|\Z")
# A full stop after these words, or after "no" before a number, does not end the sentence.
TITLE = re.compile(
    r"\b(?:mr|mrs|ms|dr|st|mt|vs|prof|approx|ca|fig|e\.g|i\.e|(?-i:[A-Z])|no(?=\.\s*\d))\.\s", re.I
)
TAKEN_BACK = re.compile(r"\b(?:wait|actually|sorry|correction|mistake|instead)\b", re.IGNORECASE)
ONLY_A_LETTER = re.compile(r"\W*(?:\\text(?:bf)?\{\W*)?([A-Za-z])\W*")
LETTER_FIRST = re.compile(r"\(([A-Z])\)|([A-Z])[.):]\s|([A-Z])\n")
LETTER_LAST = re.compile(r"\s\(?([A-Z])\)?\.?\Z|\s\(([a-z])\)\.?\Z")
AROUND = " \t\n*:$"


class FinalAnswerParser:
    r"""Parser of the final answer of a worked solution; options may be formulas.

    For a query with choices, the answer is the label that `LabelParser` reads, if any. Otherwise
    the answer is the last `\boxed{...}` of the reply, else the line `Answer: ...`, else the text
    after "the answer is" up to the end of the sentence, else the whole reply. For a query with
    choices a letter means its option; so does the first or last letter of a reply without a stated
    answer. A letter before a value that differs from its option's value does not count: "(B) 10 pi"
    is not the option 2 pi. Other answers stay unchanged: 0.5 may equal the option \frac{1}{2},
    which a metric checks.
    """

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        if (label := stated_label(query, completion)) is not None:
            return label
        reply = first_turn(strip_thinking(completion.text))
        stated = find_stated_answers(reply)
        rationale, sure = rationale_before(reply, stated), read_confidence(reply, completion)
        reply = drop_confidence(reply)
        found = stated_part(reply)
        said = (reply if found is None else found).strip(AROUND).removesuffix(".").strip(AROUND)
        if not said:
            return Answer("", valid=False, rationale=rationale)
        letter = _letter(said, query.choices)
        if letter is None and found is None and (last := LETTER_LAST.search(reply)):
            letter = (last[1] or last[2]).upper()
        said = _option(letter, said, query.choices)
        return Answer(said, labels=(said,), confidence=sure, rationale=rationale)


def stated_part(reply: str) -> str | None:
    """Return the last box, the last line `Answer: ...` or the text after "the answer is"."""
    stated = find_stated_answers(reply)
    box = last_box(reply)
    boxed = None if box is None else box[1]
    candidates = (boxed, stated[-1][1] if stated else None, _after_phrase(reply))
    return next((one for one in candidates if one is not None), None)


def last_box(reply: str) -> tuple[int, str] | None:
    """Return the start and the content of the last box, up to its closing brace."""
    opened = list(BOXED.finditer(reply))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for at in range(start, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return start, reply[start:at]
    return start, reply[start:]


def _after_phrase(reply: str) -> str | None:
    phrases = list(PHRASE.finditer(reply))
    if not phrases:
        return None
    rest = reply[phrases[-1].end() :].strip(AROUND)
    titles = {found.end() for found in TITLE.finditer(rest)}
    ends = (end.start() for end in SENTENCE_ENDS.finditer(rest) if end.end() not in titles)
    return rest[: next(ends)]


def _letter(said: str, choices: Sequence[str]) -> str | None:
    """Return the letter of an option, unless a value follows that is not the option's."""
    match = ONLY_A_LETTER.fullmatch(said) or LETTER_FIRST.match(said)
    if match is None:
        return None
    letter = next(filter(None, match.groups()), "").upper()
    rest = SENTENCE_ENDS.split(said[match.end() :], maxsplit=1)[0]
    option = dict(zip(ascii_uppercase, choices, strict=False)).get(letter, "")
    same_line = not match[0].endswith("\n")
    return None if same_line and values_differ(rest, option) else letter


def _option(letter: str | None, said: str, choices: Sequence[str]) -> str:
    """Return the option with this letter or text, or else the text unchanged."""
    options = dict(zip(ascii_uppercase, choices, strict=False))
    if letter in options:
        return options[letter]
    bare = [choice.strip(AROUND) for choice in choices]
    named = find_choice(said, bare)
    return said if named is None else choices[bare.index(named)]
