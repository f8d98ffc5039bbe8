"""MathVision: accuracy by value, and the published scoring, which reads replies and compares
answers in its own way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_uppercase

from bottega.evaluation.metrics.metric import MeanScore
from bottega.parsing import strip_thinking
from bottega.parsing.formulas import CLOSING, FormulaParser, NotAFormula, evaluate, formula_value
from bottega.protocols import Parser
from bottega.types import Answer, Completion, Example, Query

BRACKETS = ("()", "[]")
FIRST_LINE = re.compile(r"(?:([A-E])|\(([A-E])\)(?: \2)?)\n")
LAST_WORD = re.compile(r" (?:([A-E])|\(([A-E])\))\.\Z")
PHRASES = (
    "the final answer is",
    "the answer is",
    "the correct answer is",
    "the answer should be",
)
BOX = "oxed{"
DROPPED = re.compile(
    r"\\[,!%]|\\?\$|\\(?:text|mbox|left|right)|\^(?:\{\\circ\}|\\circ)"
    r"|\{m\}\^3|m\^3|\{(?:units|km)\}|units|km"
)
BARE_ROOT = re.compile(r"\\sqrt([^{])")
BARE_FRACTION = re.compile(r"\\frac([^{])([^{]?)")
BRACKETED_LETTER = re.compile(r"\(([a-e])\)")
BRACED_LETTER = re.compile(r"\{([a-e])\}")
IGNORED = re.compile(r"\$|~|\\,|\\(?:displaystyle|qquad|quad|left|right)")
NUMBER = re.compile(r"(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(\\%)?")
PRODUCT_SIGNS = ("*", r"\times", r"\cdot")
QUOTIENT_SIGNS = ("/", ":", r"\div")
# The published code ignores the text from here on: "24) cm" is 24, but "24 cm" has no value.
STOP = re.compile(r"[)\]}&_]|\\}|\\to|\\rightarrow|\.(?!\d)")
NO_FACTOR = re.compile(rf"{STOP.pattern}|[-+*/:,;<>=|^!]|\\times|\\cdot|\\div")
MAX_FACTORIAL = 170  # larger factorials exceed floats


class OfficialMathVisionParser:
    """Parser of the answer as MathVision's published code reads it.

    The answer is a letter in the first line or at the end of the last sentence, else a number after
    the last "is", else the last box, else the sentence after "the answer is", else the whole reply.
    It is in lower case, without spaces, and begins after the last equals sign. `parse` reads the
    rationale and the confidence.
    """

    def __init__(self, parse: Parser) -> None:
        self._parse = parse

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        text = read_answer(strip_thinking(completion.text))
        answer = self._parse(query, completion)
        return replace(answer, text=text, labels=(text,) if text else (), valid=bool(text))


def read_answer(reply: str) -> str:
    """Return the answer of a reply in the form that `official_equal` compares."""
    text = _stated(reply.strip())
    if BOX not in text:
        for phrase in PHRASES:
            text = _after(phrase.capitalize(), _after(phrase, text))
    return _clean(_content(text.lower().replace("{}", "")))


def _stated(reply: str) -> str:
    """Return the letter or the number that the reply states, or else the reply."""
    found = (FIRST_LINE.match(reply), LAST_WORD.search(reply))
    letters = [one[1] or one[2] for one in found if one]
    if letters:
        return min(letters)
    number = reply.rpartition("is ")[2].rstrip(".")
    try:
        float(number)
    except ValueError:
        return reply
    return number


def _after(phrase: str, text: str) -> str:
    """Return the sentence after the last occurrence of a phrase, or else the text."""
    _, found, rest = text.rpartition(phrase)
    rest = rest.strip()
    return rest.split("\n")[0].split(". ")[0] if found else rest


def _content(text: str) -> str:
    """Return the right side of the last equals sign: in the last box, up to the last brace of the
    reply, else in the text."""
    _, box, rest = text.rpartition(BOX)
    text = rest.rpartition("}")[0] if box and "}" in rest else text
    opened, closed = text.find("{"), text.find("}")
    if closed != -1 and (opened == -1 or closed < opened):
        text = text[:closed]
    return text.rpartition("=")[2].rpartition(r"\approx")[2]


def _clean(text: str) -> str:
    """Remove spaces, TeX's text and spacing commands, degrees and the units m^3 and km."""
    text = "".join(text.split()).replace("∞", r"\infty").replace(r"+\infty", r"\infty")
    text = DROPPED.sub("", text.replace(r"\\", "\\"))
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    if "sqrt" in text:  # the published code completes fractions only beside a root
        text = BARE_ROOT.sub(r"\\sqrt{\1}", text)
        text = BARE_FRACTION.sub(_braced_fraction, text)
    text = BRACED_LETTER.sub(r"\1", BRACKETED_LETTER.sub(r"\1", text))
    return text.rstrip(".").lstrip(":")


def _braced_fraction(match: re.Match[str]) -> str:
    below = f"{{{match[2]}}}" if match[2] else ""
    return rf"\frac{{{match[1]}}}{below}"


class OfficialMathVisionAccuracy(MeanScore):
    """Accuracy with the verdicts of MathVision's published code, for answers of
    `OfficialMathVisionParser`.

    An answer is right if it equals the gold letter, the gold option's text or the open answer. The
    published code executes replies; this class evaluates formulas without running code.
    """

    name = "mathvision_accuracy_official"

    def score(self, item: Example, answer: Answer, /) -> float:
        golds = [item.answer, *option_letter(item)]
        return float(answer.valid and any(official_equal(gold, answer.text) for gold in golds))


def official_equal(gold: str, answer: str) -> bool:
    """Compare an answer with the gold one: by text, by element or by value to two decimals."""
    ours, theirs = gold.lower().strip(), answer.lower().strip()
    if not ours or not theirs:
        return False
    if ours == theirs or _elements(ours) == _elements(theirs):
        return True
    values = official_value(ours), official_value(theirs)
    return None not in values and values[0] == values[1]


def _elements(text: str) -> str:
    """Return a tuple or list with the value of each element, or the text if one has none."""
    parts = text[1:-1].split(",")
    if len(parts) == 1 or text[0] + text[-1] not in ("()", "[]"):
        return text
    fixed = [part if "infty" in part or part in ("a", "-a") else None for part in parts]
    values = [one or official_value(part) for one, part in zip(fixed, parts, strict=True)]
    return text if None in values else f"{text[0]}{values}"


def official_value(formula: str) -> float | None:
    """Return the value of a formula, to two decimals, as the published code reads it."""
    text = IGNORED.sub(" ", formula).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    value = evaluate(OfficialFormulaParser(text))
    return None if value is None else round(value, 2)


class OfficialFormulaParser(FormulaParser):
    r"""Parser of LaTeX as the published code's library reads it.

    Units and names have no value; an integer before a fraction is a factor (4\frac{1}{2} is 2); a
    product without a sign precedes a quotient (4/2\pi is 4/(2\pi)); powers associate to the left.
    """

    def whole(self) -> float:
        found = self.sum()
        if self.peek() and not STOP.match(self.text, self.at):
            raise NotAFormula
        return found

    def product(self) -> float:
        total = self.signed()
        while sign := self.accept(*PRODUCT_SIGNS, *QUOTIENT_SIGNS):
            factor = self.signed()
            total = total * factor if sign in PRODUCT_SIGNS else total / factor
        return total

    def power(self) -> float:
        """Read factors without a sign between them."""
        total = self.raised()
        while self.peek() and not NO_FACTOR.match(self.text, self.at):
            total *= self.raised()
        return total

    def raised(self) -> float:
        base = self.atom()
        while sign := self.accept("^", "!", "'"):
            if sign == "^":
                base = math.pow(base, self.atom())
            elif sign == "!":
                base = _factorial(base)
        return base

    def atom(self) -> float:
        if bracket := self.accept("(", "[", "{"):
            return self.closed_by(CLOSING[bracket])
        if self.accept(r"\{"):
            return self.closed_by(r"\}")
        if self.accept(r"\frac"):
            return self.argument() / self.argument()
        if self.accept(r"\sqrt"):
            degree = self.closed_by("]") if self.accept("[") else 2.0
            return math.pow(self.argument(), 1 / degree)
        return math.pi if self.accept(r"\pi") else self.number()

    def argument(self) -> float:
        if not self.accept("{"):
            raise NotAFormula
        return self.closed_by("}")

    def number(self) -> float:
        found = NUMBER.match(self.text, self.at)
        if found is None:
            raise NotAFormula
        self.at = found.end()
        return float(found[1].replace(",", "")) / (100 if found[2] else 1)


def _factorial(number: float) -> float:
    if not number.is_integer() or not 0 <= number <= MAX_FACTORIAL:
        raise NotAFormula
    return float(math.factorial(int(number)))


class MathVisionAccuracy(MeanScore):
    """Accuracy of the option's letter or text, or of the open answer.

    Answers match up to case and spaces, or by value to two decimals (1/3 is 0.33). Tuples are
    compared element by element. The official code executes the reply as code; this class parses
    formulas (`arithmetic`), and also degrees, units and mixed numbers. A value that several options
    share selects none of them: as sums, 5-4-3-2-1 equals 5-2-3-4-1.
    """

    name = "mathvision_accuracy"

    def score(self, item: Example, answer: Answer, /) -> float:
        if not answer.valid:
            return 0.0
        choices = item.query.choices
        named = [choice for choice in choices if _bare(choice) == _bare(answer.text)]
        if named:
            return float(item.answer in named)
        predicted = (answer.text, answer.text.replace(r"\approx", "=").rpartition("=")[2])
        others = [choice for choice in choices if choice != item.answer]
        return float(
            _is_one(predicted, [item.answer, *option_letter(item)])
            and not _is_one(predicted, others)
        )


def option_letter(item: Example) -> list[str]:
    """Return the letter of the right option; an open question has none."""
    choices = item.query.choices
    return [ascii_uppercase[choices.index(item.answer)]] if item.answer in choices else []


def _is_one(predicted: Sequence[str], texts: Sequence[str]) -> bool:
    return any(equal(text, one) for text in texts for one in predicted)


def equal(gold: str, predicted: str) -> bool:
    """Compare two answers; empty texts never match."""
    ours, theirs = _bare(gold), _bare(predicted)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    one, other = _tuple_elements(ours), _tuple_elements(theirs)
    if len(one) != len(other) or (len(one) > 1 and ours[0] != theirs[0]):
        return False
    return all(a == b or _same_value(a, b) for a, b in zip(one, other, strict=True))


def _bare(text: str) -> str:
    without_case = "".join(text.lower().split()).strip("$")
    return without_case.replace(r"\left", "").replace(r"\right", "")


def _tuple_elements(text: str) -> list[str]:
    """Split a tuple or list of at least two elements; else return the text itself."""
    if text[0] + text[-1] not in BRACKETS:
        return [text]
    parts, depth, start = list[str](), 0, 1
    for at, mark in enumerate(text[1:-1], 1):
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:-1]] if parts else [text]


def _same_value(one: str, other: str) -> bool:
    ours, theirs = formula_value(one), formula_value(other)
    return ours is not None and theirs is not None and round(ours, 2) == round(theirs, 2)
