"""Formulas in replies: their notation, tokens and values."""

from __future__ import annotations

import math
import re
import unicodedata

COUNTED = "zero one two three four five six seven eight nine ten eleven twelve"
DIGITS = {word: str(number) for number, word in enumerate(COUNTED.split())}
# Scripts without spaces: each character is a token.
SIGNS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
RAISED = {"²": "^2", "³": "^3", "⁄": "/"}
WRAPPED = re.compile(r"\\(?:text(?:bf)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s+(?=\w)")  # not the variable in "a-2"
HYPHEN = re.compile(r"(?<=\w)-(?=[^\W\d_]{2})")
BRACKETED = re.compile(r"\(([^()]*)\)")
TOKENS = re.compile(
    rf"(?P<number>\d*\.?\d+)|[{SIGNS}]|[^\W\d_{SIGNS}]+|[-+*/^=<>|\\(){{}}\[\]±\u2190-\u22ff]"
)
MARKS = " \t\n\"'`*_.,;:!?"


def formula_tokens(text: str) -> list[str]:
    """Return the words, numbers and signs in order, without punctuation, articles and TeX
    wrappers."""
    for symbol, text_form in RAISED.items():
        text = text.replace(symbol, text_form)
    text = unicodedata.normalize("NFKC", text).casefold().replace("⁄", "/")
    text = _bare(HYPHEN.sub(" ", normalize_formula(WRAPPED.sub(r"\1", text))))
    found = TOKENS.finditer(ARTICLE.sub("", text))
    return [_number(one[0]) if one["number"] else DIGITS.get(one[0], one[0]) for one in found]


def _bare(text: str) -> str:
    """Strip outer marks and brackets, and thousands separators outside brackets.

    In brackets a comma separates numbers.
    """
    bracketed = BRACKETED.fullmatch(text.strip(MARKS))
    if bracketed:
        return bracketed[1]
    return text.strip("`* \t\n") if "(" in text or "[" in text else THOUSANDS.sub("", text)


def _number(text: str) -> str:
    whole, _, part = text.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


MAX_LENGTH = 200
MAX_DEPTH = 30

WITHOUT_VALUE = re.compile(
    r"\\(?:left|right)(?![a-z])|\\[,;!: ]|\\?[%$]|~|\\textdollar(?![a-z])|°"
    r"|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\(?:degree|displaystyle)(?![a-z])"
)
UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*\}"
    r"|(?<=[\d\s)}])(?:mm|cm|dm|km|m|units?|degrees?|square|cubic))"
    r"(?:\s*(?:\^\s*(?:\{\s*\d\s*\}|\d)|[²³]))?"
)
REPLACEMENTS = {
    "−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "π": r"\pi ", "√": r"\sqrt ",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cdot": "*", r"\times": "*", r"\div": "/",
    "{,}": "",
}  # fmt: skip
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
PLAIN_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")
WHOLE_FRACTION = re.compile(r"\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)")
BARE_PI = re.compile(r"(?<![a-z\\])pi(?![a-z])", re.IGNORECASE)
CLOSING = {"(": ")", "[": "]", "{": "}"}


def formula_value(formula: str) -> float | None:
    r"""Return the value of a formula of numbers, or None.

    Supported are + - * / ^, brackets, \frac, \sqrt[n], \pi and mixed numbers (1\frac{1}{2}).
    Degrees, per cent and units of length are ignored. Anything else, more than `MAX_LENGTH`
    characters, and values that are not finite real numbers give None.
    """
    if len(formula) > MAX_LENGTH:
        return None
    without_units = UNIT.sub("", WITHOUT_VALUE.sub("", formula.lower()))
    return evaluate(FormulaParser(THOUSANDS.sub("", normalize_formula(without_units))))


def evaluate(parser: FormulaParser) -> float | None:
    """Return the value of a parser's text, or None if the text is no formula or the value is not
    finite."""
    try:
        found = parser.whole()
    except (NotAFormula, ArithmeticError, ValueError):
        return None
    return found if math.isfinite(found) else None


def values_differ(one: str, other: str) -> bool:
    r"""Return whether two texts are certainly different values.

    True if both have values that differ by more than 0.01, or if they have the same words and signs
    but different numbers, as in "10 pi" and "2\pi".
    """
    values = [formula_value(BARE_PI.sub(r"\\pi ", text)) for text in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not math.isclose(values[0], values[1], abs_tol=0.01)
    (ours, our_words), (theirs, their_words) = _numbers_and_words(one), _numbers_and_words(other)
    return our_words == their_words and bool(ours and theirs) and ours != theirs


def _numbers_and_words(text: str) -> tuple[list[str], list[str]]:
    tokens = [token for token in formula_tokens(text) if token != "\\"]
    numbers = [token for token in tokens if PLAIN_NUMBER.fullmatch(token)]
    return numbers, [token for token in tokens if not PLAIN_NUMBER.fullmatch(token)]


def normalize_formula(formula: str) -> str:
    """Return the formula in one notation, without degrees, per cent and spacing commands."""
    text = WITHOUT_VALUE.sub("", formula)
    for notation, replacement in REPLACEMENTS.items():
        text = text.replace(notation, replacement)
    return text


class NotAFormula(Exception):
    pass


class FormulaParser:
    """Recursive-descent parser. `math.pow` raises for results that are not real or too large."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> float:
        found = self.sum()
        if self.peek():
            raise NotAFormula
        return found

    def sum(self) -> float:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAFormula
        total = self.product()
        while sign := self.accept("+", "-"):
            total += self.product() if sign == "+" else -self.product()
        self.depth -= 1
        return total

    def product(self) -> float:
        total = self.signed()
        while True:
            sign = self.accept("*", "/")
            if sign == "/":
                total /= self.signed()
            elif sign == "*":
                total *= self.signed()
            elif self.peek() in ("(", "[", "{", "\\"):  # "2 3" is not a product
                total *= self.power()
            else:
                return total

    def signed(self) -> float:
        sign = 1.0
        while found := self.accept("+", "-"):
            sign = -sign if found == "-" else sign
        return sign * self.power()

    def power(self) -> float:
        base = self.atom()
        return math.pow(base, self.signed()) if self.accept("^") else base

    def atom(self) -> float:
        if bracket := self.accept("(", "[", "{"):
            return self.closed_by(CLOSING[bracket])
        if self.accept(r"\frac"):
            return self.argument() / self.argument()
        if self.accept(r"\sqrt"):
            degree = self.closed_by("]") if self.accept("[") else 2.0
            radicand = self.argument()
            if degree < 1:
                raise NotAFormula
            return math.pow(radicand, 1 / degree)
        if self.accept(r"\pi"):
            return math.pi
        whole = self.number()
        # A mixed number, such as 1\frac{1}{2}, is a sum.
        fraction = WHOLE_FRACTION.match(self.text, self.at) if self.peek() == "\\" else None
        return whole + self.atom() if fraction and whole.is_integer() else whole

    def argument(self) -> float:
        r"""Read one TeX argument: a group, a command or a single digit, as in \frac12."""
        if self.peek().isdigit():
            digit = self.text[self.at]
            self.at += 1
            return float(digit)
        return self.atom()

    def closed_by(self, bracket: str) -> float:
        found = self.sum()
        if not self.accept(bracket):
            raise NotAFormula
        return found

    def number(self) -> float:
        found = PLAIN_NUMBER.match(self.text, self.at)
        if found is None:
            raise NotAFormula
        self.at = found.end()
        return float(found[0])

    def accept(self, *marks: str) -> str:
        """Consume and return the mark at this position, or return an empty text."""
        self.peek()
        for mark in marks:
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
        return ""

    def peek(self) -> str:
        """Return the next character that is not a space, or an empty text at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]
