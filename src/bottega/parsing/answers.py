"""Parts of a reply, comparison with choices, and parsers of free text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from bottega.parsing.replies import WORDS, cut_dialogue, first_turn, strip_thinking, unwrap
from bottega.types import Answer, Completion, Query

# Only punctuation of the same line may precede these words: otherwise a reply of punctuation alone
# takes quadratic time.
STATED_ANSWER = re.compile(r"^[^\w\n]*answer(?: choice)?\W*:\s*(.*)$", re.IGNORECASE | re.MULTILINE)
STATED_CONFIDENCE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w:]*:[^\d\n-]*?(\d*\.?\d+)\s*(%?)",
    re.IGNORECASE | re.MULTILINE,
)
TEMPLATE_OPENS = re.compile(r"^[^\w\n]*BEGIN FORMAT TEMPLATE[^\w\n]*$", re.MULTILINE)
CONFIDENCE_LINE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w\n]*:.*$", re.IGNORECASE | re.MULTILINE
)
ANSWER_PHRASE = re.compile(r"\bthe (?:final |correct )?answer is\b:?\s*", re.IGNORECASE)
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # the decimal point of ".5"
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"


def find_stated_answers(reply: str) -> list[re.Match[str]]:
    """Return the lines `Answer: ...`. The last one counts: a model may repeat the template
    first."""
    return list(STATED_ANSWER.finditer(reply))


def rationale_before(reply: str, stated: Sequence[re.Match[str]]) -> str | None:
    """Return the text before the first stated answer, which is the rationale."""
    if not stated:
        return None
    lines = TEMPLATE_OPENS.sub("", reply[: stated[0].start()]).split("\n")
    while lines and not WORDS.search(lines[-1]):  # a horizontal rule above the answer
        lines.pop()
    return "\n".join(lines).strip() or None


def drop_confidence(reply: str) -> str:
    """Return the reply without its confidence line."""
    return CONFIDENCE_LINE.sub("", reply).strip()


def read_confidence(reply: str, completion: Completion) -> float | None:
    """Return the confidence stated in the reply, or else the probability of its tokens."""
    stated = STATED_CONFIDENCE.findall(reply)
    if stated:
        number, percent = stated[-1]
        value = float(number) / (100 if percent else 1)
        if 0 <= value <= 1:
            return value
    if completion.logprob is None or math.isnan(completion.logprob):
        return None
    return math.exp(min(0.0, completion.logprob))


class ChoiceIndex:
    """Index of choices by their normalized text, for repeated look-ups."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices
        self.texts = [normalize(choice) for choice in choices]
        counts = Counter(self.texts)
        pairs = zip(self.texts, choices, strict=True)
        self._by_text = {text: choice for text, choice in pairs if text and counts[text] == 1}
        self._exact = frozenset(choices)
        self._signed = frozenset(map(_signed, self.texts))

    def find(self, text: str) -> str | None:
        """Return the choice that equals the text up to case, outer punctuation and spacing. Return
        None if there is no such choice, or more than one."""
        return text if text in self._exact else self._by_text.get(normalize(text))

    def has_signed(self, text: str) -> bool:
        """Return whether a choice equals the text if all dashes are equal and spaces ignored."""
        return _signed(normalize(text)) in self._signed


@lru_cache(64)
def choice_index(choices: tuple[str, ...]) -> ChoiceIndex:
    """Return the index of choices; those of a task are the same for all of its replies."""
    return ChoiceIndex(choices)


def _signed(text: str) -> str:
    return "".join(text.translate(DASHES).split())


def find_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the text, as `ChoiceIndex.find` does."""
    return text if text in choices else ChoiceIndex(choices).find(text)


def normalize(text: str) -> str:
    """Return the text without case, outer punctuation and repeated spaces, in NFKC form."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    if "." in folded:
        folded = POINT.sub("0.", folded)
    return " ".join(folded.strip(QUOTES).split())


def plain_text(query: Query, completion: Completion, /) -> Answer:
    """Return the reply without its thinking; an empty reply is invalid."""
    text = strip_thinking(completion.text)
    return Answer(text, valid=bool(text))


def last_answer(query: Query, completion: Completion, /) -> Answer:
    """Return the closing line `Answer: ...` with the text above it as rationale, or else the whole
    reply without its thinking. An empty reply is invalid.

    `{"answer": ...}` counts as such a line. Dialogue after it is ignored.
    """
    whole = first_turn(strip_thinking(completion.text))
    reply = cut_dialogue(unwrap(whole), query)
    stated = find_stated_answers(reply)
    closes = stated and not WORDS.search(drop_confidence(reply[stated[-1].end() :]))
    text = stated[-1][1].strip("*_` \t") if closes else ""
    if not text:
        return Answer(whole, valid=bool(whole))
    return Answer(text, rationale=rationale_before(reply, stated))
