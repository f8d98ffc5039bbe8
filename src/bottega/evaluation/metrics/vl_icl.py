"""VL-ICL's exact match, and containment, which Cache-of-Thought reports."""

from __future__ import annotations

import re

from bottega.evaluation.metrics.metric import MeanScore
from bottega.parsing.answers import normalize
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
