"""The value of a short formula, in LaTeX or plain. Model replies are hostile text: nothing here
evaluates code, length and depth are limited, and floats overflow where integers would grow."""

from __future__ import annotations

import math
import re

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
