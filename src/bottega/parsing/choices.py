"""Multiple choice as the MMMU benchmark reads it (`eval/eval_utils.py` of MMMU-Benchmark/MMMU), and
its reading of open answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from typing import Literal

from bottega.parsing.replies import (
    before,
    confidence,
    match,
    plain,
    spoken,
    stated_answers,
    without_confidence,
)
from bottega.types import Answer, Completion, Query

ENDS = ",.!?;:'"
FEWEST_WORDS = 6  # for an option's text to count inside of a reply
LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
# Of whole words: a point inside of a number is none of their ends.
START, END = r"(?<!\w)(?<!\.(?=\d))", r"(?!\w|(?<=\d)\.\d)"
NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    # Without the look-behind a long row of digits would be read from each of them.
    re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)

Unparsable = Literal["none", "random"]
LetteredPrompter = Mapping[str, str]


class ChoiceParser:
    """Reads a letter, or an option's text, as the option: the query's choices are (A), (B) and so
    on, up to Z. Options with the same text are the same answer, whichever letter was said.

    The official parse takes the last "(B)" of the reply, or else the last " B ", or else, in a
    reply of more than five words, the last option that is named, as a piece of any word ("cat" in
    "caterpillar") and the first of two that begin at one place. With `whole_words` it is named by
    whole words only, and the longest counts ("in front of", not "in"). Where a line `Answer: ...`
    is stated, that line is read before the rest. What this does not understand may still be a
    choice that stands alone, in any case and punctuation ("**b**", "B. Paris", "paris").

    What remains is invalid. With `unparsable="random"` it is a choice drawn by the seed and the
    query, as in the official code; such an answer has no confidence. A query without choices is
    answered by the stated answer or the whole reply, for `open_candidates` to read.
    """

    def __init__(
        self, *, unparsable: Unparsable = "none", seed: int = 0, whole_words: bool = False
    ) -> None:
        self.named = _named_by_words if whole_words else _named
        self.unparsable = unparsable
        self.seed = seed

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = spoken(completion.text)
        stated = stated_answers(reply)
        rationale = before(reply, stated)
        sure = confidence(reply, completion)
        reply = without_confidence(reply)
        last = stated[-1][1].strip() if stated else reply
        if not query.choices:
            labels = (last,) if last else ()
            return Answer(last, bool(last), labels, sure if last else None, rationale)
        options = dict(zip(ascii_uppercase, query.choices, strict=False))
        said = self._chosen(last, options) or self._chosen(reply, options)
        if said is not None:
            return Answer(said, labels=(said,), confidence=sure, rationale=rationale)
        if self.unparsable == "none":
            return Answer(last, valid=False, rationale=rationale)
        drawn = random.Random(f"{self.seed} {query.id or query.text}").choice(query.choices)
        return Answer(drawn, labels=(drawn,), rationale=rationale)

    def _chosen(self, text: str, options: LetteredPrompter) -> str | None:
        letter = _official(text, options, self.named)
        return _alone(text, options) if letter is None else options[letter]


def _named(text: str, options: LetteredPrompter) -> str | None:
    """The letter of the option that begins last, the first of several; None if there is none."""
    folded = text.lower()
    return _last(options, lambda letter: folded.rfind(options[letter].lower()))


def _named_by_words(text: str, options: LetteredPrompter) -> str | None:
    """Of the options that stand as whole words the one that ends last, the longest of several."""

    def ends(letter: str) -> tuple[int, int]:
        option = options[letter]
        whole = rf"{START}{re.escape(option)}{END}"
        found = re.finditer(whole, text, re.IGNORECASE)
        return max((match.end() for match in found), default=-1), len(option)

    last = max(options, key=ends)
    return last if ends(last)[0] >= 0 else None


def _last(options: LetteredPrompter, position: Callable[[str], int]) -> str | None:
    last = max(options, key=position)  # the first of those that stand at the same place
    return last if position(last) >= 0 else None


def _official(
    text: str, options: LetteredPrompter, named: Callable[[str, LetteredPrompter], str | None]
) -> str | None:
    """The letter by the official rules, None where the official code would draw one."""
    for end in ENDS:  # one after the other, so that "B,." keeps its comma
        text = text.strip(end)
    text = f" {text} "
    lettered = _last(options, lambda letter: text.rfind(f"({letter})")) or _last(
        options, lambda letter: text.rfind(f" {letter} ")
    )
    if lettered is None and len(text.split()) >= FEWEST_WORDS:
        return named(text, options)
    return lettered


def _alone(text: str, options: LetteredPrompter) -> str | None:
    """The option, if the text is nothing but it, its letter or both."""
    named = match(text, tuple(dict.fromkeys(options.values())))
    if named is not None:
        return named
    said = plain(text)
    for letter, option in options.items():
        both = (f"{letter}{mark} {option}" for mark in (".", ")", ":"))
        if said in map(plain, (letter, *both)):
            return option
    return None


def open_candidates(reply: str) -> list[str | float]:
    """What an open answer may be, by the official rules: of each line the shortest tail behind
    "is", "so", "therefore" and the like (the whole reply if there is none), and the numbers in
    these, rounded to two decimals. Texts are in lower case.
    """
    tails = _tails(reply.strip().strip(".").lower())
    numbers = [found for tail in tails for pattern in NUMBERS for found in pattern.findall(tail)]
    return list(dict.fromkeys(form for text in (*tails, *numbers) for form in open_forms(text)))


def open_forms(text: str) -> list[str | float]:
    """How an open answer is compared: a number as a number, a text in lower case. A single letter
    has a space before or behind it, or else it would be found in most words."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
    return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _tails(reply: str) -> list[str]:
    lines = reply.split("\n")
    tails: list[str] = []
    for number, line in enumerate(lines, 1):
        leads = (*LEADS, "=") if number == len(lines) else LEADS
        behind = [line.rpartition(lead)[2].strip() for lead in leads if lead in line]
        shortest = _shortest(behind)
        if shortest and shortest not in tuple(ENDS):
            tails.append(shortest)
    return tails or [reply]


def _shortest(tails: Sequence[str]) -> str:
    """An empty tail counts only until another is seen, as in the official code."""
    shortest = ""
    for tail in tails:
        if not shortest or len(tail) < len(shortest):
            shortest = tail
    return shortest


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
