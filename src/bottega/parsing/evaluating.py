"""Whether two answers are the same, by the kind of the answer: the rule-based evaluators of RCTS.

Each is 1 or 0, whichever answer is which, and an invalid answer is the same as none. They are what
the rewards of a search take as `agree`.
"""

from __future__ import annotations

import re

from bottega.parsing.agreement import close, decided, final, in_words, number, with_options
from bottega.parsing.arithmetic import value
from bottega.parsing.final import FinalAnswerParser
from bottega.parsing.labels import LabelParser
from bottega.parsing.replies import match, plain
from bottega.parsing.sequences import is_formula, tokens
from bottega.types import Answer, Completion, Query

LISTED = re.compile(r"[,;|\n]+(?: ?and )?| and ")
# Dates, telephone numbers, results of games: not to be calculated.
JOINED = re.compile(r"\d\s*[-/]\s*\d")


def same_answer(one: Answer, other: Answer, query: Query, /) -> float:
    """`same_choice` where the query has choices or its text lists options by letter, `same_number`
    for two numbers, else `same_words`."""
    query = with_options(query)
    if query.choices:
        return same_choice(one, other, query)
    if one.labels and set(one.labels) == set(other.labels):
        return float(one.valid and other.valid)
    numbers = (number(final(answer.text, query)) for answer in (one, other))
    by_words = any(found is None for found in numbers) and same_words(one, other, query)
    return float(by_words or same_number(one, other, query))


def same_choice(one: Answer, other: Answer, query: Query, /) -> float:
    """The same option, or options, of the query: by its text, its letter, or a number that is no
    other option's (0.5 names \\frac{1}{2}). What names no option is the same up to case, outer
    punctuation and spacing."""
    if not (one.valid and other.valid):
        return 0.0
    query = with_options(query)
    if any(len(_labels(answer, query)) > 1 for answer in (one, other)):
        return float(_several(one, query) == _several(other, query))
    ours, theirs = _chosen(one, query), _chosen(other, query)
    if ours or theirs:
        return float(ours == theirs)
    return float(plain(one.text) == plain(other.text))


def same_number(one: Answer, other: Answer, query: Query, /) -> float:
    """The same number, however it is written: 1,000 and 1000.0, five and 5, 50 % and 50. Whole
    numbers must be equal, others up to a millionth. Formulas are the same if their values are to
    two decimals, as in MathVision's metric: \\sqrt{2} and 1.41. What is no number is the same as
    nothing."""
    if not (one.valid and other.valid):
        return 0.0
    return float(_equal(final(one.text, query), final(other.text, query)))


def same_words(one: Answer, other: Answer, query: Query, /) -> float:
    """The same words, as short answers are compared in VizWiz and OK-VQA: case, punctuation,
    articles and order do not count, and "two" is "2". Where one holds digits or a formula, order,
    signs and decimals do count: -5 kg and 5 kg, 1.5 kg and 5.1 kg. What begins with yes or no says
    just that. It knows no synonyms; `agreement` also tells how far longer answers have words in
    common."""
    if not (one.valid and other.valid):
        return 0.0
    ours, theirs = final(one.text, query), final(other.text, query)
    if not plain(ours) or not plain(theirs):
        return float(bool(ours) and ours == theirs)
    same = decided(ours, theirs)
    if same is None and (is_formula(ours) or is_formula(theirs)):
        return float(tokens(ours) == tokens(theirs))
    return float(plain(ours) == plain(theirs) or in_words(ours, theirs) == 1.0)


def _labels(answer: Answer, query: Query) -> frozenset[str]:
    """Empty where they are no options."""
    labels = frozenset(answer.labels)
    return labels if labels.issubset(query.choices) else frozenset()


def _several(answer: Answer, query: Query) -> frozenset[str]:
    """The options of a list, by their texts or letters; empty if it holds anything else."""
    labels = _labels(answer, query)
    if labels:
        return labels
    said = Completion(answer.text)
    listed = LabelParser(multi_label=True)(query, said)
    if listed.valid:
        return frozenset(listed.labels)
    parts = LISTED.split(answer.text)
    read = frozenset(FinalAnswerParser()(query, Completion(part)).text for part in parts)
    return read if read.issubset(query.choices) else frozenset()


def _chosen(answer: Answer, query: Query) -> frozenset[str]:
    """Empty where no option is named."""
    options = frozenset(query.choices)
    if labels := _labels(answer, query):
        return labels
    if answer.text in options:  # also one that begins like an option's letter: "A. niger"
        return frozenset({answer.text})
    said = final(answer.text, query)
    named = match(said, query.choices)
    if named is not None:
        return frozenset({named})
    worth_it = [option for option in options if _equal(said, option)]
    return frozenset(worth_it if len(worth_it) == 1 else ())


def _equal(one: str, other: str) -> bool:
    """As numbers."""
    ours, theirs = number(one), number(other)
    if ours is not None and theirs is not None:
        return close(ours, theirs)
    values = [None if JOINED.search(text) else value(text) for text in (one, other)]
    if values[0] is None or values[1] is None:
        return False
    return round(values[0], 2) == round(values[1], 2)
