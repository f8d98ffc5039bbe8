"""Whether two replies say the same, where nobody knows what is right."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from string import ascii_uppercase

from bottega.parsing.choices import ChoiceParser, FinalAnswerParser
from bottega.parsing.replies import match, plain
from bottega.types import Completion, Query

ARTICLES = frozenset({"a", "an", "the"})
COUNTED = "zero one two three four five six seven eight nine ten eleven twelve"
DIGITS = {word: str(number) for number, word in enumerate(COUNTED.split())}
# Words, and single signs of scripts that do not divide words.
SIGNS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
TOKENS = re.compile(rf"[{SIGNS}]|[^\W{SIGNS}]+")
# "B+" and "-B" are no letters, "no. 5" is a number.
AROUND_LETTER = r"[^\w+\-−=<>\\^]*"
LETTER = re.compile(rf"{AROUND_LETTER}([A-Z])(?:{AROUND_LETTER}|[.):]\s.*)", re.DOTALL)
YES_OR_NO = re.compile(r"\W*(yes|no)\b(?!\.?\s*\d)", re.IGNORECASE)
OPTION = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]+(\S.*)$", re.MULTILINE)
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,30})\}\{([^{}]{1,30})\}")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,200})?(?:\.\d{1,40})?(?:/\d{1,40})?")
AROUND_NUMBER = " \t\n$€£¥%°~≈="
CLOSE = 1e-6


def agreement(one: str, other: str, query: Query) -> float:
    """How far two replies to a query agree, from 0 to 1, whichever is which.

    What is compared is what each reply answers in the end: what stands in its last `\\boxed{}`,
    behind "Answer:" or behind "the answer is", or else all of it, without any thinking. Answers
    that are options of the query (its choices, or lines like "B) Paris" in its text), letters,
    numbers, or begin with yes or no either agree or do not. Other texts agree as far as their words
    do: F1 over words without articles, as for SQuAD, so that a long answer in other words has about
    a half. It knows no synonyms and no units. A reply that says nothing agrees with nothing.
    """
    query = with_options(query)
    ours, theirs = final(one, query), final(other, query)
    if not plain(ours) or not plain(theirs):
        return float(bool(ours) and ours == theirs)
    if plain(ours) == plain(theirs):
        return 1.0
    if any(_is_option(said, query) for said in (ours, theirs)):
        return 0.0
    numbers = number(ours), number(theirs)
    if numbers[0] is not None and numbers[1] is not None:
        return float(close(numbers[0], numbers[1]))
    return in_words(ours, theirs)


def with_options(query: Query) -> Query:
    """Its choices are those that its text lists, where it has none."""
    return query if query.choices else Query(query.text, choices=_options(query.text))


def final(reply: str, query: Query) -> str:
    """The option that was meant, by its text, or what was said."""
    said = FinalAnswerParser()(query, Completion(reply)).text
    if query.choices and said not in query.choices:  # an option is not to be read once more
        read = ChoiceParser(whole_words=True)
        for text in (said, reply):
            answer = read(query, Completion(text))
            if answer.valid:
                return answer.text
    return said


def _is_option(said: str, query: Query) -> bool:
    return match(said, query.choices) is not None


def _options(text: str) -> tuple[str, ...]:
    """What a question lists by letter, from A on; the last list if there are several."""
    options: list[str] = []
    for letter, option in OPTION.findall(text):
        if letter == "A":
            options = [option.rstrip(" \t")]
        elif options and letter == ascii_uppercase[len(options) % 26]:
            options.append(option.rstrip(" \t"))
    return tuple(options) if len(options) > 1 else ()


def in_words(ours: str, theirs: str) -> float:
    same = decided(ours, theirs)
    return _f1(_words(ours), _words(theirs)) if same is None else float(same)


def decided(ours: str, theirs: str) -> bool | None:
    """By what two answers say before all else: a letter, yes or no. None if they do not."""
    letters = LETTER.fullmatch(ours), LETTER.fullmatch(theirs)
    if letters[0] and letters[1] and min(len(plain(ours)), len(plain(theirs))) == 1:
        return letters[0][1] == letters[1][1]
    said = YES_OR_NO.match(ours), YES_OR_NO.match(theirs)
    if said[0] and said[1]:
        return said[0][1].lower() == said[1][1].lower()
    return None


def number(text: str) -> Fraction | None:
    bare = DIGITS.get(plain(text), FRACTION.sub(r"\1/\2", text)).lstrip(AROUND_NUMBER)
    bare = bare.rstrip(AROUND_NUMBER + ".").replace(" ", "")
    if not any(sign.isdigit() for sign in bare) or not NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(bare.replace(",", ""))
    except (ValueError, ZeroDivisionError):  # "1.5/2" is no number to us
        return None


def close(one: Fraction, other: Fraction) -> bool:
    """Whole numbers are so only if they are equal: years, identity numbers, counts."""
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def _words(text: str) -> Counter[str]:
    found = TOKENS.findall(unicodedata.normalize("NFKC", text).casefold())
    return Counter(DIGITS.get(word, word) for word in found if word not in ARTICLES)


def _f1(ours: Counter[str], theirs: Counter[str]) -> float:
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0
