"""Answers as the VQA evaluation compares them (visualqa.org, `vqaEval.py`)."""

from __future__ import annotations

import re

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
BETWEEN_DIGITS = re.compile(r"\d,\d")
# The published pattern means to spare periods after a digit too, and does not: "5." becomes "5".
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


def _without_one_apostrophe(words: str) -> dict[str, str]:
    """Each spelling that lacks one of its apostrophes, to the whole one."""
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
    """Without punctuation and articles, in lower case, number words as digits, contractions with
    their apostrophes; the published rules, their oddities included."""
    words = (NUMBERS.get(word, word) for word in _unpunctuated(one_line(text)).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def _unpunctuated(text: str) -> str:
    """A mark at the edge of a word goes, one inside a word becomes a space."""
    thousands = BETWEEN_DIGITS.search(text) is not None
    result = text
    for mark in PUNCTUATION:
        at_edge = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if thousands or at_edge else " ")
    return PERIOD.sub("", result)
