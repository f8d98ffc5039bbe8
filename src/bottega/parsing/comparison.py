"""Comparison of two answers or replies: by choice, number, formula and words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from string import ascii_uppercase

from bottega.parsing.answers import find_choice, normalize
from bottega.parsing.choices import ChoiceParser
from bottega.parsing.final_answers import FinalAnswerParser
from bottega.parsing.formulas import DIGITS, SIGNS, formula_tokens, formula_value, is_formula
from bottega.parsing.labels import LabelParser
from bottega.types import Answer, Completion, Query

ARTICLES = frozenset({"a", "an", "the"})
WORD_TOKENS = re.compile(rf"[{SIGNS}]|[^\W{SIGNS}]+")
# "B+" and "-B" are not letters; "no. 5" is a number.
AROUND_LETTER = r"[^\w+\-−=<>\\^]*"
LETTER = re.compile(rf"{AROUND_LETTER}([A-Z])(?:{AROUND_LETTER}|[.):]\s.*)", re.DOTALL)
YES_OR_NO = re.compile(r"\W*(yes|no)\b(?!\.?\s*\d)", re.IGNORECASE)
OPTION = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]+(\S.*)$", re.MULTILINE)
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,30})\}\{([^{}]{1,30})\}")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,200})?(?:\.\d{1,40})?(?:/\d{1,40})?")
AROUND_NUMBER = " \t\n$€£¥%°~≈="
CLOSE = 1e-6


def agreement(one: str, other: str, query: Query) -> float:
    """Return the symmetric agreement of two replies to a query, from 0 to 1.

    Compared are the final answers: the content of the last `\\boxed{}`, the text after "Answer:" or
    "the answer is", or else the whole reply without thinking. Options of the query (its choices, or
    lines like "B) Paris" in its text), letters, numbers and answers that begin with yes or no agree
    fully or not at all. Other texts agree by F1 over words without articles, as in SQuAD: a long
    paraphrase scores about 0.5. Synonyms and units are unknown. An empty reply agrees with nothing.
    """
    query = with_options(query)
    ours, theirs = final_answer(one, query), final_answer(other, query)
    if not normalize(ours) or not normalize(theirs):
        return float(bool(ours) and ours == theirs)
    if normalize(ours) == normalize(theirs):
        return 1.0
    if any(find_choice(said, query.choices) is not None for said in (ours, theirs)):
        return 0.0
    numbers = parse_number(ours), parse_number(theirs)
    if numbers[0] is not None and numbers[1] is not None:
        return float(numbers_close(numbers[0], numbers[1]))
    return word_overlap(ours, theirs)


def with_options(query: Query) -> Query:
    """Return the query with the options listed in its text, if it has no choices."""
    return query if query.choices else Query(query.text, choices=_options(query.text))


def final_answer(reply: str, query: Query) -> str:
    """Return the text of the chosen option, or else the final answer of the reply."""
    said = FinalAnswerParser()(query, Completion(reply)).text
    if query.choices and said not in query.choices:  # an exact option needs no parsing
        read = ChoiceParser(whole_words=True)
        for text in (said, reply):
            answer = read(query, Completion(text))
            if answer.valid:
                return answer.text
    return said


def _options(text: str) -> tuple[str, ...]:
    """Return the options that a question lists by letter, from A on; the last of several lists."""
    options: list[str] = []
    for letter, option in OPTION.findall(text):
        if letter == "A":
            options = [option.rstrip(" \t")]
        elif options and letter == ascii_uppercase[len(options) % 26]:
            options.append(option.rstrip(" \t"))
    return tuple(options) if len(options) > 1 else ()


def word_overlap(ours: str, theirs: str) -> float:
    """Return 0 or 1 for letters, yes and no, and else the F1 over words."""
    same = compare_decisive(ours, theirs)
    if same is not None:
        return float(same)
    mine, other = _words(ours), _words(theirs)
    common = (mine & other).total()
    return 2 * common / (mine.total() + other.total()) if common else 0.0


def compare_decisive(ours: str, theirs: str) -> bool | None:
    """Compare two answers that are letters, or begin with yes or no. Return None for others."""
    letters = LETTER.fullmatch(ours), LETTER.fullmatch(theirs)
    if letters[0] and letters[1] and min(len(normalize(ours)), len(normalize(theirs))) == 1:
        return letters[0][1] == letters[1][1]
    said = YES_OR_NO.match(ours), YES_OR_NO.match(theirs)
    if said[0] and said[1]:
        return said[0][1].lower() == said[1][1].lower()
    return None


def parse_number(text: str) -> Fraction | None:
    """Return the number in the text: digits, a word up to twelve, or a fraction. Else None."""
    bare = DIGITS.get(normalize(text), FRACTION.sub(r"\1/\2", text)).lstrip(AROUND_NUMBER)
    bare = bare.rstrip(AROUND_NUMBER + ".").replace(" ", "")
    if not any(sign.isdigit() for sign in bare) or not NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(bare.replace(",", ""))
    except (ValueError, ZeroDivisionError):  # "1.5/2" is not supported
        return None


def numbers_close(one: Fraction, other: Fraction) -> bool:
    """Return whether two numbers are equal up to a millionth.

    Whole numbers (years, counts, identifiers) must be exactly equal.
    """
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def _words(text: str) -> Counter[str]:
    found = WORD_TOKENS.findall(unicodedata.normalize("NFKC", text).casefold())
    return Counter(DIGITS.get(word, word) for word in found if word not in ARTICLES)


LISTED = re.compile(r"[,;|\n]+(?: ?and )?| and ")
# Dates, telephone numbers and scores are not formulas.
JOINED = re.compile(r"\d\s*[-/]\s*\d")


def same_answer(one: Answer, other: Answer, query: Query, /) -> float:
    """Compare two answers by the kind of the query and the answers.

    Use `same_choice` if the query has choices or lists options by letter, `same_number` for two
    numbers, and else `same_words`.
    """
    query = with_options(query)
    if query.choices:
        return same_choice(one, other, query)
    if one.labels and set(one.labels) == set(other.labels):
        return float(one.valid and other.valid)
    numbers = (parse_number(final_answer(answer.text, query)) for answer in (one, other))
    by_words = any(found is None for found in numbers) and same_words(one, other, query)
    return float(by_words or same_number(one, other, query))


def same_choice(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1.0 if both answers name the same options of the query, else 0.0.

    An answer names an option by its text, its letter, or a number equal to one option only (0.5
    names \\frac{1}{2}). Other answers are compared up to case, outer punctuation and spacing.
    """
    if not (one.valid and other.valid):
        return 0.0
    query = with_options(query)
    if any(len(_labels(answer, query)) > 1 for answer in (one, other)):
        return float(_options_in(one, query) == _options_in(other, query))
    ours, theirs = _option_in(one, query), _option_in(other, query)
    if ours or theirs:
        return float(ours == theirs)
    return float(normalize(one.text) == normalize(other.text))


def same_number(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1.0 for equal numbers in any notation: 1,000 and 1000.0, five and 5, 50 % and 50.

    Whole numbers must be equal, others up to a millionth. Formulas must agree to two decimals, as
    in MathVision's metric: \\sqrt{2} and 1.41. Text that is not a number equals nothing.
    """
    if not (one.valid and other.valid):
        return 0.0
    return float(_equal(final_answer(one.text, query), final_answer(other.text, query)))


def same_words(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1.0 for equal words, as VizWiz and OK-VQA compare short answers, else 0.0.

    Case, punctuation, articles and order are ignored, and "two" equals "2". If an answer contains
    digits or a formula, order, signs and decimals matter: 5 kg differs from -5 kg, 1.5 kg from 5.1
    kg. Only the first word counts in answers that begin with yes or no. Synonyms are unknown; use
    `agreement` for partial overlap.
    """
    if not (one.valid and other.valid):
        return 0.0
    ours, theirs = final_answer(one.text, query), final_answer(other.text, query)
    if not normalize(ours) or not normalize(theirs):
        return float(bool(ours) and ours == theirs)
    same = compare_decisive(ours, theirs)
    if same is None and (is_formula(ours) or is_formula(theirs)):
        return float(formula_tokens(ours) == formula_tokens(theirs))
    return float(normalize(ours) == normalize(theirs) or word_overlap(ours, theirs) == 1.0)


def _labels(answer: Answer, query: Query) -> frozenset[str]:
    """Return the labels of an answer, or an empty set if they are not options."""
    labels = frozenset(answer.labels)
    return labels if labels.issubset(query.choices) else frozenset()


def _options_in(answer: Answer, query: Query) -> frozenset[str]:
    """Return the options of a list of texts or letters; empty if it contains anything else."""
    labels = _labels(answer, query)
    if labels:
        return labels
    listed = LabelParser(multi_label=True)(query, Completion(answer.text))
    if listed.valid:
        return frozenset(listed.labels)
    parts = LISTED.split(answer.text)
    read = frozenset(FinalAnswerParser()(query, Completion(part)).text for part in parts)
    return read if read.issubset(query.choices) else frozenset()


def _option_in(answer: Answer, query: Query) -> frozenset[str]:
    """Return the option that the answer names, or an empty set."""
    options = frozenset(query.choices)
    if labels := _labels(answer, query):
        return labels
    if answer.text in options:  # first, because a text may look like a letter: "A. niger"
        return frozenset({answer.text})
    said = final_answer(answer.text, query)
    named = find_choice(said, query.choices)
    if named is not None:
        return frozenset({named})
    equal = [option for option in options if _equal(said, option)]
    return frozenset(equal if len(equal) == 1 else ())


def _equal(one: str, other: str) -> bool:
    """Return whether two texts are equal numbers or formulas of equal value."""
    ours, theirs = parse_number(one), parse_number(other)
    if ours is not None and theirs is not None:
        return numbers_close(ours, theirs)
    values = [None if JOINED.search(text) else formula_value(text) for text in (one, other)]
    if values[0] is None or values[1] is None:
        return False
    return round(values[0], 2) == round(values[1], 2)
