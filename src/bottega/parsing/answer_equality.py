"""Equality of two answers by the kind of the answer: choice, number, formula, words."""

from __future__ import annotations

import math
import re
import unicodedata

from bottega.parsing.agreement import (
    DIGITS,
    SIGNS,
    close,
    decided,
    final,
    in_words,
    number,
    with_options,
)
from bottega.parsing.choices import FinalAnswerParser
from bottega.parsing.labels import LabelParser
from bottega.parsing.replies import match, plain
from bottega.types import Answer, Completion, Query

# A hyphen inside of a word, or before one, is no sign; that of "x-y", "-x" and "B-" is one.
FORMULA = re.compile(r"[\d\\^=<>+±\u2190-\u22ff]|(?<=\w)[-−](?!\w\w)|(?<!\w)[-−](?=\w\b)")
RAISED = {"²": "^2", "³": "^3", "⁄": "/"}
WRAPPED = re.compile(r"\\(?:text(?:bf)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s+(?=\w)")  # but not the a of "a-2"
HYPHEN = re.compile(r"(?<=\w)-(?=[^\W\d_]{2})")
BRACKETED = re.compile(r"\(([^()]*)\)")
TOKENS = re.compile(
    rf"(?P<number>\d*\.?\d+)|[{SIGNS}]|[^\W\d_{SIGNS}]+|[-+*/^=<>|\\(){{}}\[\]±\u2190-\u22ff]"
)
MARKS = " \t\n\"'`*_.,;:!?"


def is_formula(text: str) -> bool:
    return FORMULA.search(unicodedata.normalize("NFKC", text)) is not None


def tokens(text: str) -> list[str]:
    """Its words, numbers and signs in order; punctuation and articles are none, nor is what TeX
    puts around them."""
    for written, meant in RAISED.items():
        text = text.replace(written, meant)
    text = unicodedata.normalize("NFKC", text).casefold().replace("⁄", "/")
    text = _bare(HYPHEN.sub(" ", spelled(WRAPPED.sub(r"\1", text))))
    found = TOKENS.finditer(ARTICLE.sub("", text))
    return [_number(one[0]) if one["number"] else DIGITS.get(one[0], one[0]) for one in found]


def _bare(text: str) -> str:
    """Less the marks and the brackets around it, and the commas of thousands, which in brackets
    stand between numbers."""
    bracketed = BRACKETED.fullmatch(text.strip(MARKS))
    if bracketed:
        return bracketed[1]
    return text.strip("`* \t\n") if "(" in text or "[" in text else THOUSANDS.sub("", text)


def _number(written: str) -> str:
    whole, _, part = written.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


LONGEST = 200
DEEPEST = 30

WITHOUT_VALUE = re.compile(
    r"\\(?:left|right)(?![a-z])|\\[,;!: ]|\\?[%$]|~|\\textdollar(?![a-z])|°"
    r"|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\(?:degree|displaystyle)(?![a-z])"
)
UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*\}"
    r"|(?<=[\d\s)}])(?:mm|cm|dm|km|m|units?|degrees?|square|cubic))"
    r"(?:\s*(?:\^\s*(?:\{\s*\d\s*\}|\d)|[²³]))?"
)
SPELLINGS = {
    "−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "π": r"\pi ", "√": r"\sqrt ",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cdot": "*", r"\times": "*", r"\div": "/",
    "{,}": "",
}  # fmt: skip
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")
WHOLE_FRACTION = re.compile(r"\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)")
CLOSING = {"(": ")", "[": "]", "{": "}"}


def value(formula: str) -> float | None:
    r"""Of numbers, + - * / ^, brackets, \frac, \sqrt[n], \pi and mixed numbers (1\frac{1}{2});
    degrees, per cent and units of length count as nothing. None for all else, for what is longer
    than `LONGEST` and for what is no finite real number.
    """
    if len(formula) > LONGEST:
        return None
    without_units = UNIT.sub("", WITHOUT_VALUE.sub("", formula.lower()))
    reader = _Reader(THOUSANDS.sub("", spelled(without_units)))
    try:
        found = reader.whole()
    except (_NoFormula, ArithmeticError, ValueError):
        return None
    return found if math.isfinite(found) else None


def spelled(formula: str) -> str:
    """In one spelling, without what has no value."""
    text = WITHOUT_VALUE.sub("", formula)
    for spelling, meant in SPELLINGS.items():
        text = text.replace(spelling, meant)
    return text


class _NoFormula(Exception):
    pass


class _Reader:
    """Recursive descent. `math.pow` raises for what is not real or too large."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> float:
        found = self.sum()
        if self.peek():
            raise _NoFormula
        return found

    def sum(self) -> float:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _NoFormula
        total = self.product()
        while sign := self.taken("+", "-"):
            total += self.product() if sign == "+" else -self.product()
        self.depth -= 1
        return total

    def product(self) -> float:
        total = self.signed()
        while True:
            sign = self.taken("*", "/")
            if sign == "/":
                total /= self.signed()
            elif sign == "*":
                total *= self.signed()
            elif self.peek() in ("(", "[", "{", "\\"):  # but "2 3" is no formula
                total *= self.power()
            else:
                return total

    def signed(self) -> float:
        sign = 1.0
        while found := self.taken("+", "-"):
            sign = -sign if found == "-" else sign
        return sign * self.power()

    def power(self) -> float:
        base = self.atom()
        if not self.taken("^"):
            return base
        exponent = self.signed()
        return math.pow(base, exponent)

    def atom(self) -> float:
        if bracket := self.taken("(", "[", "{"):
            return self.closed_by(CLOSING[bracket])
        if self.taken(r"\frac"):
            return self.argument() / self.argument()
        if self.taken(r"\sqrt"):
            degree = self.closed_by("]") if self.taken("[") else 2.0
            return self.root(self.argument(), degree)
        if self.taken(r"\pi"):
            return math.pi
        return self.mixed(self.number())

    def mixed(self, whole: float) -> float:
        fraction = WHOLE_FRACTION.match(self.text, self.at) if self.peek() == "\\" else None
        return whole + self.atom() if fraction and whole.is_integer() else whole

    def root(self, radicand: float, degree: float) -> float:
        if degree < 1:
            raise _NoFormula
        return math.pow(radicand, 1 / degree)

    def argument(self) -> float:
        r"""What TeX takes as one: a group, a command or a single digit, as in \frac12."""
        if self.peek().isdigit():
            digit = self.text[self.at]
            self.at += 1
            return float(digit)
        return self.atom()

    def closed_by(self, bracket: str) -> float:
        found = self.sum()
        if not self.taken(bracket):
            raise _NoFormula
        return found

    def number(self) -> float:
        found = NUMBER.match(self.text, self.at)
        if found is None:
            raise _NoFormula
        self.at = found.end()
        return float(found[0])

    def taken(self, *marks: str) -> str:
        """The mark that stands here, which is then behind us; empty if it is none of these."""
        self.peek()
        for mark in marks:
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
        return ""

    def peek(self) -> str:
        """The next character that is no space, empty at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]


LISTED = re.compile(r"[,;|\n]+(?: ?and )?| and ")
# Dates, telephone numbers, results of games: not to be calculated.
JOINED = re.compile(r"\d\s*[-/]\s*\d")


def same_answer(one: Answer, other: Answer, query: Query, /) -> float:
    """`same_choice` where the query has choices or its text lists options by letter, `same_number`
    for two numbers, else `same_words`."""
    query = with_options(query)
    if query.choices:
        return same_choice(one, other, query)
    if one.labels and set(one.labels) == set(other.labels):
        return float(one.valid and other.valid)
    numbers = (number(final(answer.text, query)) for answer in (one, other))
    by_words = any(found is None for found in numbers) and same_words(one, other, query)
    return float(by_words or same_number(one, other, query))


def same_choice(one: Answer, other: Answer, query: Query, /) -> float:
    """The same option, or options, of the query: by its text, its letter, or a number that is no
    other option's (0.5 names \\frac{1}{2}). What names no option is the same up to case, outer
    punctuation and spacing."""
    if not (one.valid and other.valid):
        return 0.0
    query = with_options(query)
    if any(len(_labels(answer, query)) > 1 for answer in (one, other)):
        return float(_several(one, query) == _several(other, query))
    ours, theirs = _chosen(one, query), _chosen(other, query)
    if ours or theirs:
        return float(ours == theirs)
    return float(plain(one.text) == plain(other.text))


def same_number(one: Answer, other: Answer, query: Query, /) -> float:
    """The same number, however it is written: 1,000 and 1000.0, five and 5, 50 % and 50. Whole
    numbers must be equal, others up to a millionth. Formulas are the same if their values are to
    two decimals, as in MathVision's metric: \\sqrt{2} and 1.41. What is no number is the same as
    nothing."""
    if not (one.valid and other.valid):
        return 0.0
    return float(_equal(final(one.text, query), final(other.text, query)))


def same_words(one: Answer, other: Answer, query: Query, /) -> float:
    """The same words, as short answers are compared in VizWiz and OK-VQA: case, punctuation,
    articles and order do not count, and "two" is "2". Where one holds digits or a formula, order,
    signs and decimals do count: -5 kg and 5 kg, 1.5 kg and 5.1 kg. What begins with yes or no says
    just that. It knows no synonyms; `agreement` also tells how far longer answers have words in
    common."""
    if not (one.valid and other.valid):
        return 0.0
    ours, theirs = final(one.text, query), final(other.text, query)
    if not plain(ours) or not plain(theirs):
        return float(bool(ours) and ours == theirs)
    same = decided(ours, theirs)
    if same is None and (is_formula(ours) or is_formula(theirs)):
        return float(tokens(ours) == tokens(theirs))
    return float(plain(ours) == plain(theirs) or in_words(ours, theirs) == 1.0)


def _labels(answer: Answer, query: Query) -> frozenset[str]:
    """Empty where they are no options."""
    labels = frozenset(answer.labels)
    return labels if labels.issubset(query.choices) else frozenset()


def _several(answer: Answer, query: Query) -> frozenset[str]:
    """The options of a list, by their texts or letters; empty if it holds anything else."""
    labels = _labels(answer, query)
    if labels:
        return labels
    said = Completion(answer.text)
    listed = LabelParser(multi_label=True)(query, said)
    if listed.valid:
        return frozenset(listed.labels)
    parts = LISTED.split(answer.text)
    read = frozenset(FinalAnswerParser()(query, Completion(part)).text for part in parts)
    return read if read.issubset(query.choices) else frozenset()


def _chosen(answer: Answer, query: Query) -> frozenset[str]:
    """Empty where no option is named."""
    options = frozenset(query.choices)
    if labels := _labels(answer, query):
        return labels
    if answer.text in options:  # also one that begins like an option's letter: "A. niger"
        return frozenset({answer.text})
    said = final(answer.text, query)
    named = match(said, query.choices)
    if named is not None:
        return frozenset({named})
    worth_it = [option for option in options if _equal(said, option)]
    return frozenset(worth_it if len(worth_it) == 1 else ())


def _equal(one: str, other: str) -> bool:
    """As numbers."""
    ours, theirs = number(one), number(other)
    if ours is not None and theirs is not None:
        return close(ours, theirs)
    values = [None if JOINED.search(text) else value(text) for text in (one, other)]
    if values[0] is None or values[1] is None:
        return False
    return round(values[0], 2) == round(values[1], 2)
