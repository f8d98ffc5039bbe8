"""Metrics of open answers: the matches of VL-ICL, and sameness by meaning."""

from __future__ import annotations

import re
from dataclasses import replace

from bottega.evaluation.metrics.metric import MeanScore
from bottega.parsing import Sameness, same_answer
from bottega.parsing.answers import normalize
from bottega.parsing.final_answers import TAKEN_BACK
from bottega.types import Answer, Example

SENTENCE_END = re.compile(r"\.\s")


class ExactMatch(MeanScore):
    """Case-insensitive match of the reply up to its first line break, else its first period.

    It needs the whole reply, so use it with `plain_text`.
    """

    name = "exact_match"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(answer.valid and _cut(answer.text).lower() == item.answer.lower())


class WholeMatch(ExactMatch):
    """Match of the whole reply, its first line, or its first sentence; 3.5 has no sentence end."""

    def score(self, item: Example, answer: Answer, /) -> float:
        line = answer.text.strip().partition("\n")[0]
        candidates, gold = (answer.text, line, SENTENCE_END.split(line)[0]), item.answer
        equal = gold in candidates or normalize(gold) in filter(None, map(normalize, candidates))
        return float(answer.valid and equal)


class Containment(ExactMatch):
    """The reply contains the answer anywhere, also "3" in "13": an optimistic metric."""

    name = "containment"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(answer.valid and item.answer.lower() in answer.text.lower())


def _cut(reply: str) -> str:
    """Cut the reply as published: keep everything before the first letter and trailing spaces."""
    reply = reply.strip()
    line, newline, _ = reply.partition("\n")
    if newline:
        return line
    sentence, _, _ = reply.partition(".")
    return sentence or reply


class SameAnswer(MeanScore):
    """Share of answers that are the same as the item's (`same_answer`): 1,234 and 1234, 12 cm and
    120 mm. Undecided answers score 0; `UndecidedShare` counts them."""

    name = "same_answer"

    def score(self, item: Example, answer: Answer, /) -> float:
        return _compared(item, answer).score


class UndecidedShare(MeanScore):
    """Share of answers that no rule finds the same as the item's or different, such as synonyms."""

    name = "undecided"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(_compared(item, answer) is Sameness.UNDECIDED)


def _compared(item: Example, answer: Answer) -> Sameness:
    """Compare an answer with the item's, or its first sentence if the whole is undecided."""
    gold = Answer(item.answer)
    found = same_answer(gold, answer, item.query)
    line = answer.text.strip().partition("\n")[0]
    first = SENTENCE_END.split(line)[0]
    if found is not Sameness.UNDECIDED or TAKEN_BACK.search(answer.text[len(first) :]):
        return found
    same = same_answer(gold, replace(answer, text=first, labels=()), item.query) is Sameness.SAME
    return Sameness.SAME if same and answer.valid else found
