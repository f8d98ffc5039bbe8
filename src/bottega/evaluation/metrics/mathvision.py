"""MathVision's accuracy: equal texts, tuples element by element, or equal values."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from bottega.evaluation.metrics.intervals import Estimate, mean
from bottega.evaluation.metrics.metric import Judged
from bottega.parsing.arithmetic import value
from bottega.types import Answer, Example

BRACKETS = ("()", "[]")


class MathVisionAccuracy:
    """The right option's letter or its text, or the open answer: equal up to case and spaces, or
    with the same value to two decimals (1/3 is 0.33). Tuples are compared element by element.

    The official code runs what the reply says as code. Ours reads formulas itself (`arithmetic`),
    and also degrees, units and mixed numbers, which the official code does not know. A value that
    several options have names none of them: as a sum 5-4-3-2-1 is 5-2-3-4-1.
    """

    name = "mathvision_accuracy"

    def score(self, item: Example, answer: Answer, /) -> float:
        if not answer.valid:
            return 0.0
        choices = item.query.choices
        named = [choice for choice in choices if _bare(choice) == _bare(answer.text)]
        if named:
            return float(item.answer in named)
        said = (answer.text, answer.text.replace(r"\approx", "=").rpartition("=")[2])
        others = [choice for choice in choices if choice != item.answer]
        return float(_is_one(said, _ways(item)) and not _is_one(said, others))

    def estimate(self, judged: Sequence[Judged], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


def _ways(item: Example) -> list[str]:
    """The right answer and, of an option, its letter."""
    choices = item.query.choices
    letters = [ascii_uppercase[choices.index(item.answer)]] if item.answer in choices else []
    return [item.answer, *letters]


def _is_one(said: Sequence[str], texts: Sequence[str]) -> bool:
    return any(equal(text, one) for text in texts for one in said)


def equal(gold: str, said: str) -> bool:
    """Empty texts are equal to nothing."""
    ours, theirs = _bare(gold), _bare(said)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    one, other = _elements(ours), _elements(theirs)
    if len(one) != len(other) or (len(one) > 1 and ours[0] != theirs[0]):
        return False
    return all(a == b or _same_value(a, b) for a, b in zip(one, other, strict=True))


def _bare(text: str) -> str:
    without_case = "".join(text.lower().split()).strip("$")
    return without_case.replace(r"\left", "").replace(r"\right", "")


def _elements(text: str) -> list[str]:
    """Of a tuple or a list at least two, else the text itself."""
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
    ours, theirs = value(one), value(other)
    return ours is not None and theirs is not None and round(ours, 2) == round(theirs, 2)
