"""Accuracy of MMMU and MathVision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from bottega.evaluation.metrics.metric import MeanScore
from bottega.parsing import open_candidates
from bottega.parsing.choices import open_forms
from bottega.parsing.formulas import formula_value
from bottega.types import Answer, Example

SUBJECT = "subject"
BRACKETS = ("()", "[]")


class MMMUAccuracy(MeanScore):
    """Accuracy by the official rules.

    A choice must be the right option. An open answer is right if one of its candidates
    (`open_candidates`) is the gold number to two decimals, or holds a gold text: "30" is not in
    "300", but "gas" is in "gasoline".

    `golds` maps query ids to all right answers of items with several. `random_fallback` affects
    only the name: unparsable replies get a random choice, as in the official code; else they are
    wrong, as in Cache-of-Thought.
    """

    def __init__(
        self, golds: Mapping[str, Sequence[str]] | None = None, *, random_fallback: bool = False
    ):
        self.name = "mmmu_accuracy_random" if random_fallback else "mmmu_accuracy"
        self._golds = golds or {}

    def score(self, item: Example, answer: Answer, /) -> float:
        if not answer.valid:
            return 0.0
        golds = self._golds.get(item.query.id or "", (item.answer,))
        if item.query.choices:
            return float(answer.text in golds)
        return float(_is_open_match(answer.text, golds))


def _is_open_match(reply: str, golds: Sequence[str]) -> bool:
    right = [form for gold in golds for form in open_forms(gold)]
    texts = [form for form in right if isinstance(form, str)]
    return any(
        any(gold in predicted for gold in texts)
        if isinstance(predicted, str)
        else predicted in right
        for predicted in open_candidates(reply)
    )


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
    one, other = _elements(ours), _elements(theirs)
    if len(one) != len(other) or (len(one) > 1 and ours[0] != theirs[0]):
        return False
    return all(a == b or _same_value(a, b) for a, b in zip(one, other, strict=True))


def _bare(text: str) -> str:
    without_case = "".join(text.lower().split()).strip("$")
    return without_case.replace(r"\left", "").replace(r"\right", "")


def _elements(text: str) -> list[str]:
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
