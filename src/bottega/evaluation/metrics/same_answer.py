"""Accuracy of open answers by their meaning, and the share that no rule decides."""

from __future__ import annotations

from dataclasses import replace

from bottega.evaluation.metrics.metric import MeanScore
from bottega.evaluation.metrics.vl_icl import SENTENCE_END
from bottega.parsing import Sameness, same_answer
from bottega.parsing.final_answers import TAKEN_BACK
from bottega.types import Answer, Example


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
