"""Scores of open answers: VQA accuracy with several annotators, VizWiz's answerability, the matches
of VL-ICL, and sameness by meaning."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.evaluation.metrics.metric import (
    Estimate,
    Judgement,
    MeanScore,
    resampled,
    with_interval,
)
from bottega.parsing import Sameness, same_answer
from bottega.parsing.answers import normalize
from bottega.parsing.final_answers import TAKEN_BACK
from bottega.types import Answer, Example

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
BETWEEN_DIGITS = re.compile(r"\d,\d")
# The published pattern intends to keep periods after a digit, but removes them: "5." becomes "5".
PERIOD = re.compile(r"\.(?!\d)")
ARTICLES = frozenset({"a", "an", "the"})
WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(WORDS.split())}}
CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've
might've mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've
shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll
someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# Query id to the annotators' answers.
References = Mapping[str, Sequence[str]]
Variant = Literal["original", "always-normalised"]
# Number of agreeing annotators for a full score.
ENOUGH = 3
UNANSWERABLE = "unanswerable"
SENTENCE_END = re.compile(r"\.\s")


def _without_one_apostrophe(words: str) -> dict[str, str]:
    """Map each contraction without one of its apostrophes to the full form."""
    return {
        word[:at] + word[at + 1 :]: word
        for word in words.split()
        for at, letter in enumerate(word)
        if letter == "'"
    }


CONTRACTIONS = _without_one_apostrophe(CONTRACTED) | {"somebody'd": "somebodyd"}


def one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def normalised(text: str) -> str:
    """Normalize by the published rules: lower case, no punctuation or articles, number words as
    digits, contractions with apostrophes."""
    words = (NUMBERS.get(word, word) for word in _unpunctuated(one_line(text)).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def _unpunctuated(text: str) -> str:
    """Remove marks at the edge of words; replace marks inside words by a space."""
    thousands = BETWEEN_DIGITS.search(text) is not None
    result = text
    for mark in PUNCTUATION:
        at_edge = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if thousands or at_edge else " ")
    return PERIOD.sub("", result)


class Agreement(Protocol):
    def __call__(self, reply: str, golds: Sequence[str], /) -> float: ...


class AnnotatorAgreement(MeanScore):
    """Agreement of an answer with the annotators' answers, at least one for each item."""

    def __init__(self, name: str, references: References, agreement: Agreement) -> None:
        self.name = name
        self._references = references
        self._agreement = agreement

    def annotators(self, item: Example) -> Sequence[str]:
        """Return the annotators' answers; empty for an unknown item."""
        return self._references.get(item.query.id or "", ())

    def score(self, item: Example, answer: Answer, /) -> float:
        golds = self.annotators(item)
        if not golds:
            raise SettingError(
                f"{self.name} has no annotator answers for the item {item.query.id!r}",
                hint="pass references with the items' query ids",
            )
        return self._agreement(answer.text, golds) if answer.valid else 0.0


def vqa_accuracy(references: References, variant: Variant = "original") -> AnnotatorAgreement:
    """Return VQA accuracy: the mean over the annotators of min(1, agreeing others / 3).

    `original` is the VQA challenge's code, which normalises (`vqa_text`) only if the annotators
    differ: if all wrote "red", then "Red" and "red." are wrong. `always-normalised` is what
    lmms-eval and most papers on large models do.
    """
    return AnnotatorAgreement(f"vqa_accuracy_{variant}", references, _VQA[variant])


def direct_answer(references: References, variant: Variant = "original") -> AnnotatorAgreement:
    """Return A-OKVQA's direct-answer accuracy: min(1, agreeing annotators / 3).

    `original` compares the exact characters.
    """
    return AnnotatorAgreement(f"direct_answer_{variant}", references, _DIRECT[variant])


def leave_one_out(matches: int, annotators: int) -> float:
    """Return the mean score with each annotator left out once.

    Annotators are identified by index. Some implementations identify them by their answer, which
    leaves out all equal answers together.
    """
    by_those = matches * min(1.0, (matches - 1) / ENOUGH)
    by_the_others = (annotators - matches) * min(1.0, matches / ENOUGH)
    return (by_those + by_the_others) / annotators


def _original(reply: str, golds: Sequence[str], /) -> float:
    reply, golds = one_line(reply), [one_line(gold) for gold in golds]
    if len(set(golds)) > 1:
        return _always_normalised(reply, golds)
    return leave_one_out(golds.count(reply), len(golds))


def _always_normalised(reply: str, golds: Sequence[str], /) -> float:
    matches = [normalised(gold) for gold in golds].count(normalised(reply))
    return leave_one_out(matches, len(golds))


def _exactly(reply: str, golds: Sequence[str], /) -> float:
    return min(1.0, list(golds).count(reply) / ENOUGH)


def _exactly_normalised(reply: str, golds: Sequence[str], /) -> float:
    return _exactly(normalised(reply), [normalised(gold) for gold in golds])


_VQA: Mapping[Variant, Agreement] = {
    "original": _original,
    "always-normalised": _always_normalised,
}
_DIRECT: Mapping[Variant, Agreement] = {
    "original": _exactly,
    "always-normalised": _exactly_normalised,
}


def vizwiz_accuracy(references: References) -> AnnotatorAgreement:
    """Return VQA accuracy as in VizWiz's code, which normalizes only the model's answer."""
    return AnnotatorAgreement("vizwiz_accuracy", references, _agreement)


def _agreement(reply: str, golds: Sequence[str], /) -> float:
    return leave_one_out(list(golds).count(normalised(reply)), len(golds))


class Answerability:
    """Average precision (`ap`) or F1 of detecting unanswerable questions, by their query ids.

    The answer "unanswerable" is the positive class; an item scores 1 if its class is right. Average
    precision ranks by confidence, with a confident "unanswerable" first; answers without one count
    as fully confident. An invalid reply counts as the wrong class with full confidence. Without an
    unanswerable item both values are 0.
    """

    def __init__(self, unanswerable: Collection[str], figure: Literal["ap", "f1"] = "ap") -> None:
        self.name = f"answerability_{figure}"
        self._unanswerable = unanswerable
        self._figure = _average_precision if figure == "ap" else _f1

    def score(self, item: Example, answer: Answer, /) -> float:
        return float((self._suspicion(item, answer) > 0) == self._is_positive(item))

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        positive = np.array([self._is_positive(one.item) for one in judged], np.float64)
        suspicion = np.array([self._suspicion(one.item, one.answer) for one in judged])
        value = self._figure(positive, suspicion, np.ones((1, len(judged))))[0]
        samples = self._figure(positive, suspicion, resampled(len(judged), seed))
        return with_interval(value, samples)

    def _is_positive(self, item: Example) -> bool:
        return item.query.id in self._unanswerable

    def _suspicion(self, item: Example, answer: Answer) -> float:
        """Return a score from 1 (certainly unanswerable) to -1."""
        if not answer.valid:
            return -1.0 if self._is_positive(item) else 1.0
        sure = 1.0 if answer.confidence is None else max(answer.confidence, np.finfo(float).tiny)
        return sure if normalised(answer.text) == UNANSWERABLE else -sure


def _f1(
    positive: NDArray[np.float64], suspicion: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return one value for each row of item weights."""
    reply = (suspicion > 0).astype(np.float64)
    both, either = weights @ (positive * reply), weights @ (positive + reply)
    return np.divide(2 * both, either, out=np.zeros_like(both), where=either > 0)


def _average_precision(
    positive: NDArray[np.float64], suspicion: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return one value for each row of item weights; equal scores are one step of the curve."""
    order = np.argsort(-suspicion, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(suspicion[order])), len(order) - 1)
    return np.array([_area(positive[order], row[order], ends) for row in weights])


def _area(
    positive: NDArray[np.float64], weights: NDArray[np.float64], ends: NDArray[np.intp]
) -> float:
    found, seen = np.cumsum(weights * positive)[ends], np.cumsum(weights)[ends]
    if found[-1] == 0:
        return 0.0
    precision = np.divide(found, seen, out=np.zeros_like(found), where=seen > 0)
    return float(np.sum(np.diff(found, prepend=0.0) * precision) / found[-1])


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
