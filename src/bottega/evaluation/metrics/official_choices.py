"""Parsers of multiple choice by the official rules of MMMU and ScienceQA, and MMMU's accuracy.

MMMU's rules are in `eval/eval_utils.py` of MMMU-Benchmark/MMMU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase

from bottega.evaluation.metrics.metric import MeanScore
from bottega.parsing import ChoiceParser, find_stated_answers, open_candidates, strip_thinking
from bottega.parsing.answers import find_choice, normalize
from bottega.parsing.choices import ENDS, open_forms
from bottega.protocols import Parser
from bottega.types import Answer, Completion, Example, Query

SUBJECT = "subject"
MIN_WORDS = 6  # of a reply in which the text of an option counts
THE_ANSWER = re.compile(r"The answer is ([A-Z])\b")

Options = Mapping[str, str]


class OneStatementParser:
    """Parser of the only "The answer is B" of a reply, as in ScienceQA's official code. Other
    replies are invalid, where that code guesses. `parse` reads the rationale and the confidence."""

    def __init__(self, parse: Parser) -> None:
        self._parse = parse

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        answer = self._parse(query, completion)
        options = dict(zip(ascii_uppercase, query.choices, strict=False))
        stated = THE_ANSWER.findall(strip_thinking(completion.text))
        option = options.get(stated[0]) if len(stated) == 1 else None
        if option is None:
            return replace(answer, valid=False, labels=())
        return replace(answer, text=option, labels=(option,), valid=True)


class OfficialMMMUParser(ChoiceParser):
    """Parser of option letters and texts with the official rules of MMMU.

    They take the last "(B)" of the reply, else the last " B ", else, in a reply of more than five
    words, the option text that begins last, also as part of a word; of two that begin at the same
    index the first counts. A line `Answer: ...` is read before the rest of the reply. If these
    rules find no option, the reply may be a single choice in any case and punctuation ("**b**",
    "B. Paris", "paris"). Options with equal texts are the same answer.
    """

    def prepare(self, reply: str, query: Query) -> str:
        return reply

    def read(self, reply: str, query: Query) -> str | None:
        options = dict(zip(ascii_uppercase, query.choices, strict=False))
        stated = find_stated_answers(reply)
        found = _chosen(stated[-1][1].strip(), options) if stated else None
        return found or _chosen(reply, options)


def _chosen(text: str, options: Options) -> str | None:
    letter = _official(text, options)
    return _alone(text, options) if letter is None else options[letter]


def _last(options: Options, position: Callable[[str], int]) -> str | None:
    last = max(options, key=position)  # the first of several at the same index
    return last if position(last) >= 0 else None


def _official(text: str, options: Options) -> str | None:
    """Return the letter by the official rules, or None where they would choose at random."""
    for end in ENDS:  # one after the other: "B,." keeps its comma
        text = text.strip(end)
    text = f" {text} "
    lettered = _last(options, lambda letter: text.rfind(f"({letter})")) or _last(
        options, lambda letter: text.rfind(f" {letter} ")
    )
    if lettered is None and len(text.split()) >= MIN_WORDS:
        folded = text.lower()
        return _last(options, lambda letter: folded.rfind(options[letter].lower()))
    return lettered


def _alone(text: str, options: Options) -> str | None:
    """Return the option if the text is only its letter, its text or both."""
    named = find_choice(text, tuple(dict.fromkeys(options.values())))
    if named is not None:
        return named
    chosen = normalize(text)
    for letter, option in options.items():
        both = (f"{letter}{mark} {option}" for mark in (".", ")", ":"))
        if chosen in map(normalize, (letter, *both)):
            return option
    return None


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
